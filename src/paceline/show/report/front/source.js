// Where a page's data comes from: the server that `paceline ui` runs, or the page itself.

class LiveSource {
  live = true;

  async #get(...path) {
    const answer = await fetch(`data/${path.map(encodeURIComponent).join("/")}`, {cache: "no-store"});
    if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
    return answer.json();
  }

  runs() { return this.#get("runs"); }
  metrics(run, generation, start) { return this.#get(run, "metrics", generation, start); }
  journal(run) { return this.#get(run, "journal"); }
  timeline(run, step) { return this.#get(run, "timeline", step); }
  sampleNames(run) { return this.#get(run, "samples"); }
  samples(run, name) { return this.#get(run, "samples", name); }
  sample(run, name, row) { return this.#get(run, "samples", name, row); }
  config(run) { return this.#get(run, "config"); }
  now(run) { return this.#get(run, "now"); }
  timelineSteps() { return null; }
}

class FrozenSource {
  live = false;

  constructor(data) { this.data = data; }

  async runs() { return this.data.runs; }
  async metrics() { return this.data.metrics; }
  async journal() { return this.data.journal; }
  async timeline(run, step) { return this.data.timelines[step] || []; }
  async sampleNames() { return Object.keys(this.data.samples); }
  async samples(run, name) { return this.data.samples[name]; }
  async sample(run, name, row) { return this.data.details[name][row]; }
  async config() { return this.data.config; }
  async now() { return null; }
  timelineSteps() { return Object.keys(this.data.timelines).map(Number); }
}

// The numbers of a run, with cached answers to repeated queries.
class Run {
  constructor(head) {
    this.head = head;
    this.name = head.name;
    this.generation = 0;
    this.clear();
  }

  clear() {
    this.steps = [];
    this.columns = {};
    this.numLines = 0;
    this.cached = new Map();
    this.journal = this.journal || {began: 0, notes: [], fleet: [], verdicts: {}, guard: []};
  }

  // Adds lines of metrics.jsonl; returns whether there was anything new.
  add(part) {
    if (part.is_new && this.generation !== part.generation) this.clear();
    this.generation = part.generation;
    this.numLines = part.num_lines;
    if (!part.steps.length) return false;
    const before = this.steps.length;
    this.steps.push(...part.steps);
    for (const [name, values] of Object.entries(part.columns)) {
      const column = this.columns[name] || (this.columns[name] = []);
      while (column.length < before) column.push(null);
      column.push(...values);
    }
    this.cached.clear();
    return true;
  }

  // Returns [step, hours, value] of a metric by step; a repeated step has its last value.
  points(name) {
    if (!this.cached.has(name)) {
      const column = this.columns[name] || [], times = this.columns.time || [];
      const began = this.journal.began || times.find(time => time) || 0;
      const byStep = new Map();
      this.steps.forEach((step, i) => {
        const value = column[i];
        if (value === null || value === undefined) return;
        byStep.set(step, [step, times[i] ? (times[i] - began) / 3600 : step, value]);
      });
      this.cached.set(name, [...byStep.values()].sort((a, b) => a[0] - b[0]));
    }
    return this.cached.get(name);
  }

  // Returns notes by step, for the curves.
  notes() {
    if (!this.cached.has("/notes")) {
      const byStep = new Map();
      for (const note of this.journal.notes) {
        if (!byStep.has(note.step)) byStep.set(note.step, []);
        byStep.get(note.step).push(note);
      }
      this.cached.set("/notes", byStep);
    }
    return this.cached.get("/notes");
  }

  setJournal(journal) {
    this.journal = journal;
    this.cached.clear();
  }

  // Returns the sets of held-out prompts; "" is the name of the set of data.val_files.
  heldOut() {
    return this.names().map(name => /^val\/(?:([^/]+)\/)?reward\/mean$/.exec(name)).filter(Boolean)
      .map(([name, set]) => ({name: set || "", prefix: name.slice(0, -"reward/mean".length)}))
      .sort((a, b) => a.name < b.name ? -1 : 1);
  }

  names() { return Object.keys(this.columns).filter(name => name !== "time").sort(); }
}
