// The page: runs, their summaries, and the parts that the other files draw; updated while runs are in progress.

const RENEW_MS = 2000;

class App {
  constructor(source, meta) {
    Object.assign(this, {source, meta, runs: new Map(), chosen: [], parts: null});
    this.main = document.querySelector("main");
    this.status = h("div", {id: "now"});
    this.trouble = h("p", {class: "bad", hidden: true});
    this.table = new RunTable(name => this.#toggle(name));
    this.body = h("div", {}, h("p", {class: "none"}, "Reading the runs ..."));
    this.main.replaceChildren(h("header", {}, h("p", {class: "brand"}, "Paceline")), this.trouble,
      this.table.element, this.body);
    document.body.append(tip);
    document.addEventListener("zoomed", () => this.#drawRange());
    addEventListener("hashchange", async () => {
      await this.#renew();
      if (this.parts?.samples) await this.#openSample();
    });
    this.last = Promise.resolve();
  }

  async start() {
    for (;;) {
      await this.#renew();
      if (!this.source.live) return;
      await new Promise(resolve => { setTimeout(resolve, RENEW_MS); });
    }
  }

  async #heads() {
    for (const head of await this.source.runs()) {
      const known = this.runs.get(head.name);
      if (known) known.head = head;
      else this.runs.set(head.name, Object.assign(new Run(head), {colour: colour(this.runs.size)}));
    }
    this.#drawList();
  }

  // Shows the runs that the address names after #, else the only run, else the list.
  #choose() {
    const [names] = location.hash.slice(1).split("?");
    const wanted = names.split(",").map(decodeURIComponent).filter(name => this.runs.has(name));
    const chosen = wanted.length || this.runs.size !== 1 ? wanted : [...this.runs.keys()];
    if (this.parts && chosen.join() === this.chosen.join() && this.runs.size === this.numKnown) return;
    const isSame = this.parts && chosen.length && chosen.join() === this.chosen.join();
    this.numKnown = this.runs.size;
    if (isSame) return;
    this.chosen = chosen;
    Object.assign(view, {range: null, step: null, cursor: null});
    this.place = undefined;
    this.#build();
    this.#drawList();
  }

  #drawList() { this.table.draw([...this.runs.values()], this.chosen); }

  #toggle(name) {
    const names = this.chosen.includes(name)
      ? this.chosen.filter(other => other !== name) : [...this.chosen, name];
    location.hash = names.map(encodeURIComponent).join(",");
  }

  #build() {
    Plot.all.clear();
    const runs = this.chosen.map(name => this.runs.get(name));
    this.parts = {curves: null, fleet: null, timeline: null, samples: null};
    if (!runs.length) {
      this.body.replaceChildren(this.runs.size ? h("p", {class: "none"}, "Choose a run, or several to compare.")
        : h("p", {class: "none"}, "There is no run here yet."));
      return;
    }
    const curves = this.parts.curves = new Curves(this.meta, runs, step => this.#step(step));
    const evaluations = this.parts.evaluations = new Evaluations(runs, step => this.#step(step));
    this.toolbar = this.#toolbar();
    if (runs.length > 1) {
      this.parts.differences = h("section", {id: "differences"});
      this.body.replaceChildren(h("h1", {}, runs.map(run => run.name).join(", ")), this.toolbar, curves.element,
        evaluations.element, this.parts.differences);
      this.#compare(runs);
      return;
    }
    const [run] = runs;
    this.tiles = h("div", {class: "tiles"});
    this.events = h("section", {id: "events"});
    Object.assign(this.parts, {fleet: new Fleet(run), timeline: new Timeline(this.source, run.name),
      samples: new Samples(this.source, run)});
    const config = h("details", {ontoggle: async () => {
      config.replaceChildren(config.firstChild, h("pre", {class: "config"}, await this.source.config(run.name)));
    }}, h("summary", {}, "config.resolved.yaml"));
    this.body.replaceChildren(h("h1", {}, run.name), h("p", {class: "facts-of-run"}), this.status, this.tiles,
      this.toolbar, curves.element.firstChild, h("div", {}, ...curves.element.children),
      h("section", {id: "timeline"}, h("h2", {}, "A step's timeline"), this.parts.timeline.element),
      evaluations.element, this.parts.fleet.element, this.parts.samples.element, this.events,
      h("section", {}, h("h2", {}, "Configuration"), config));
  }

  #toolbar() {
    const redraw = () => Plot.drawAll();
    const smooth = h("input", {type: "range", min: "0", max: "0.98", step: "0.02", value: String(view.smooth),
      oninput: () => { view.smooth = Number(smooth.value); view.smoothChosen = true; redraw(); }});
    this.smooth = smooth;
    const axis = h("select", {onchange: () => { view.byTime = axis.value === "hours"; Plot.zoom(null); }},
      h("option", {value: "steps"}, "by step"), h("option", {value: "hours"}, "by time"));
    axis.value = view.byTime ? "hours" : "steps";
    const notes = h("input", {type: "checkbox", checked: view.notes,
      onchange: () => { view.notes = notes.checked; redraw(); }});
    const bound = label => h("input", {type: "number", placeholder: label, step: "any", "aria-label": label,
      onchange: () => this.#range()});
    this.bounds = [bound("from"), bound("to")];
    const whole = h("button", {class: "small", onclick: () => Plot.zoom(null)}, "whole run");
    return h("div", {class: "toolbar"}, axis, h("label", {}, "smoothing ", smooth),
      h("label", {}, notes, " events"), h("span", {class: "row"}, ...this.bounds, whole));
  }

  #range() {
    const [from, to] = this.bounds.map(bound => bound.value === "" ? null : Number(bound.value));
    const place = view.byTime ? 1 : 0;
    const ends = this.chosen.flatMap(name => this.runs.get(name).points(this.meta.step_seconds))
      .map(point => point[place]);
    const range = [from ?? Math.min(0, ...ends), to ?? Math.max(1, ...ends)];
    Plot.zoom((from === null && to === null) || !(range[1] > range[0]) ? null : range);
  }

  #drawRange() {
    if (!this.bounds) return;
    this.bounds.forEach((bound, i) => {
      bound.value = view.range ? String(Number(view.range[i].toPrecision(view.byTime ? 3 : 6))) : "";
    });
  }

  async #step(step) {
    if (this.chosen.length !== 1) return;
    view.step = step;
    Plot.setCursor(null);
    await Promise.all([this.parts.timeline.show(step), this.parts.samples.show(step)]);
  }

  // One update at a time: two at once would fetch the same lines twice.
  #renew() {
    this.last = this.last.then(() => this.#look());
    return this.last;
  }

  async #look() {
    try {
      if (this.source.live || !this.runs.size) await this.#heads();
      this.#choose();
      const chosen = [...this.chosen];
      const runs = chosen.map(name => this.runs.get(name));
      const fresh = await Promise.all(runs.map(run => this.#fetchMetrics(run)));
      // The journal of a long run takes seconds: its curves do not wait for it.
      if (runs.some(run => !run.looked)) this.#drawCurves(runs);
      await Promise.all(runs.map((run, i) => this.#fetchJournal(run, fresh[i])));
      if (runs.length === 1) await this.#drawRun(runs[0], fresh[0]);
      if (fresh.some(Boolean)) this.#drawCurves(runs);
    } catch (error) {
      this.trouble.textContent = `nobody answers any more (${error.message}); the page shows what it had`;
      this.trouble.hidden = false;
      return;
    }
    this.trouble.hidden = true;
  }

  // Returns whether there is anything new to draw.
  async #fetchMetrics(run) {
    const fresh = run.add(await this.source.metrics(run.name, run.generation, run.numLines));
    return fresh || !run.looked;
  }

  async #fetchJournal(run, fresh) {
    if (fresh || this.source.live) run.setJournal(await this.source.journal(run.name));
    run.looked = true;
  }

  #drawCurves(runs) {
    if (!this.parts.curves) return;
    if (!view.smoothChosen) {
      view.smooth = Math.max(...runs.map(run => run.steps.length)) > 60 ? 0.8 : 0;
      this.smooth.value = String(view.smooth);
    }
    this.parts.curves.draw();
    this.parts.evaluations.draw();
  }

  async #drawRun(run, fresh) {
    const now = await this.source.now(run.name);
    this.#drawNow(run, now);
    this.parts.fleet.draw(now);
    if (!fresh) return;
    this.body.querySelector(".facts-of-run").textContent = [...run.head.facts, run.head.end].filter(Boolean).join(" · ");
    this.#drawTiles(run);
    this.#drawEvents(run);
    await this.parts.samples.renew();
    await this.#openSample();
    const last = run.points(this.meta.step_seconds).at(-1);
    if (view.step === null && last) await this.parts.timeline.show(last[0]);
  }

  // Opens the sample that the address names after "?", once for each address.
  async #openSample() {
    const [, place] = location.hash.split("?");
    if (place === this.place) return;
    this.place = place;
    if (place) await this.parts.samples.open(place);
  }

  #drawNow(run, now) {
    if (!now || !now.line) {
      this.status.replaceChildren();
      return;
    }
    const seconds = run.points(this.meta.step_seconds).slice(-20).map(point => point[2]);
    const left = (run.head.total_steps ?? 0) - (run.head.step ?? 0);
    const mean = seconds.reduce((a, b) => a + b, 0) / (seconds.length || 1);
    this.status.replaceChildren(h("b", {}, now.state), ` ${now.line}`,
      seconds.length && left > 0 ? `, about ${duration(mean * left)} to the end` : "");
  }

  #drawTiles(run) {
    const tiles = Object.entries(run.head.headlines).filter(([, pair]) => pair).map(([title, [a, b, count]]) =>
      [title, `${a.toFixed(3)} → ${b.toFixed(3)}`,
        `${b - a >= 0 ? "+" : ""}${(b - a).toFixed(3)}${count > 1 ? `, means of ${count} steps` : ""}`]);
    const steps = run.points(this.meta.step_seconds).map(point => point[2]);
    if (steps.length) {
      const sum = steps.reduce((a, b) => a + b, 0);
      tiles.push(["Steps", `${run.head.step}`, `${duration(sum)} in steps`]);
      tiles.push(["Step", duration(median(steps)), "median"]);
    }
    for (const {name, title, note, percent} of this.meta.tiles) {
      const values = run.points(name).map(point => point[2]);
      const middle = median(values);
      if (values.length) tiles.push([title, percent ? `${(middle * 100).toFixed(1)} %` : short(middle), note]);
    }
    const {admitted = 0, ...others} = run.journal.verdicts;
    const refused = Object.values(others).reduce((a, b) => a + b, 0);
    if (admitted) tiles.push(["Trajectories", admitted.toLocaleString("en"), `admitted, ${refused} refused`]);
    this.tiles.replaceChildren(...tiles.map(([title, value, note]) =>
      h("div", {class: "tile"}, h("span", {}, title), h("b", {}, value), h("i", {}, note))));
  }

  #drawEvents(run) {
    const {guard, notes, began} = run.journal;
    const rules = guard.map(rule => h("tr", {}, h("td", {}, h("b", {}, rule.name)), h("td", {}, rule.steps),
      h("td", {}, Object.entries(rule.actions).map(([name, n]) => n > 1 ? `${name} ${n}x` : name).join(", ")),
      h("td", {}, rule.skipped ? String(rule.skipped) : ""),
      h("td", {}, `${short(rule.worst)} in step ${rule.worst_step}`),
      h("td", {}, `${rule.sense} ${short(rule.threshold)}`)));
    const heads = ["rule", "steps", "done", "updates skipped", "worst", "fires"];
    const table = h("div", {class: "scroll"}, h("table", {},
      h("thead", {}, h("tr", {}, ...heads.map(head => h("th", {}, head)))), h("tbody", {}, ...rules)));
    const loud = notes.filter(note => !note.quiet);
    const shown = loud.length > 150 ? [...loud.slice(0, 20), ...loud.slice(-130)] : loud;
    const lines = shown.map(note => h("tr", {class: note.level},
      h("td", {}, duration(Math.max(0, note.time - began))), h("td", {}, `step ${note.step}`),
      h("td", {}, h("b", {}, note.name)), h("td", {}, note.text)));
    this.events.replaceChildren(
      ...(guard.length ? [h("h2", {}, "Guard"), table] : []),
      h("h2", {}, "Events of note"), h("div", {class: "scroll"}, h("table", {class: "events"}, h("tbody", {}, ...lines))),
      loud.length > shown.length ? h("p", {class: "none"}, `${loud.length - shown.length} more in events.jsonl`) : "");
  }

  // Lists the keys in which the runs' configurations differ.
  async #compare(runs) {
    const trees = await Promise.all(runs.map(async run => leaves(await this.source.config(run.name))));
    const keys = [...new Set(trees.flatMap(tree => [...tree.keys()]))]
      .filter(key => key !== "trainer.run_dir" && new Set(trees.map(tree => tree.get(key))).size > 1);
    const rows = keys.map(key => h("tr", {}, h("td", {}, key),
      ...trees.map(tree => h("td", {}, tree.get(key) ?? "–"))));
    this.parts.differences.replaceChildren(h("h2", {}, "What differs in the configurations"),
      rows.length ? h("div", {class: "scroll"}, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "key"),
        ...runs.map(run => h("th", {}, run.name)))), h("tbody", {}, ...rows))) : h("p", {class: "none"}, "Nothing."));
  }
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}

// Returns the dotted keys and values of a YAML file that Paceline wrote.
function leaves(text) {
  const values = new Map(), path = [];
  for (const line of text.split("\n")) {
    const match = /^( *)([\w./-]+):(?: (.*))?$/.exec(line);
    if (!match) {
      const item = /^( *)- (.*)$/.exec(line);
      const key = path.join(".");
      if (item && key) values.set(key, `${values.get(key) ? `${values.get(key)}, ` : ""}${item[2]}`);
      continue;
    }
    path.length = match[1].length / 2;
    path.push(match[2]);
    if (match[3] !== undefined) values.set(path.join("."), match[3]);
  }
  return values;
}

const valueOf = id => {
  const node = document.getElementById(id);
  return node && JSON.parse(node.textContent);
};
const frozen = valueOf("frozen");
new App(frozen ? new FrozenSource(frozen) : new LiveSource(), valueOf("meta")).start();
