// Samples of a step: filters, components of the reward, and both log-probs token by token.

const PAGE = 20;
const BY = {
  "reward, highest first": (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
  "reward, lowest first": (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity),
  "longest first": (a, b) => b.num_response_tokens - a.num_response_tokens,
  "shortest first": (a, b) => a.num_response_tokens - b.num_response_tokens,
  "by prompt": (a, b) => a.prompt_id - b.prompt_id || a.sample_index - b.sample_index,
};

class Samples {
  constructor(source, run) {
    Object.assign(this, {source, run, rows: [], names: [], count: PAGE, fixed: false});
    const changed = () => { this.count = PAGE; this.draw(); };
    const number = (label, hint) => h("input", {type: "number", step: "any", placeholder: hint, "aria-label": label,
      oninput: changed});
    this.fields = {
      name: h("select", {"aria-label": "step", onchange: () => { this.fixed = true; this.load(); }}),
      text: h("input", {type: "search", placeholder: "text in prompt or response", oninput: changed}),
      prompt: number("prompt", "prompt"),
      low: number("least reward", "reward ≥"), high: number("greatest reward", "reward ≤"),
      short: number("least length", "tokens ≥"), long: number("greatest length", "tokens ≤"),
      end: h("select", {"aria-label": "how it ended", onchange: changed}),
      by: h("select", {"aria-label": "order", onchange: changed},
        ...Object.keys(BY).map(name => h("option", {}, name))),
    };
    this.note = h("p", {class: "none"});
    this.rewards = h("div", {class: "histogram"});
    this.list = h("div");
    this.refused = h("div");
    this.more = h("button", {onclick: () => { this.count += PAGE; this.draw(); }}, "more");
    this.element = h("section", {id: "samples", hidden: true}, h("h2", {}, "Samples"),
      h("div", {class: "filters"}, ...Object.values(this.fields)), this.rewards, this.note, this.refused, this.list, this.more);
  }

  // Shows the samples of the files that exist now; those of the last training step until another is selected.
  async renew() {
    const names = await this.source.sampleNames(this.run.name);
    if (names.join() === this.names.join()) return;
    this.names = names;
    this.element.hidden = !names.length;
    const before = this.fields.name.value;
    this.fields.name.replaceChildren(...[...names].reverse().map(name =>
      h("option", {value: name}, titleOf(name))));
    const steps = names.filter(name => name.startsWith("step"));
    this.fields.name.value = this.fixed && names.includes(before) ? before : steps.at(-1) || names.at(-1);
    if (this.fields.name.value !== before) await this.load();
  }

  async show(step) {
    const of = this.names.filter(name => name.startsWith("step"));
    if (!of.length) return;
    this.fields.name.value = of.reduce((a, b) => Math.abs(stepOf(b) - step) < Math.abs(stepOf(a) - step) ? b : a);
    this.fixed = true;
    await this.load();
  }

  // Shows the sample that an address names as FILE/ROW.
  async open(place) {
    const [name, row] = place.split("/");
    if (!this.names.includes(name)) return;
    this.fields.name.value = name;
    this.fixed = true;
    await this.load();
    const found = this.rows.find(other => other.row === Number(row));
    if (!found) return;
    this.only = found;
    this.draw();
    this.element.scrollIntoView();
  }

  async load() {
    this.only = null;
    const name = this.fields.name.value;
    this.rows = name ? await this.source.samples(this.run.name, name) : [];
    const before = this.fields.end.value;
    const ends = [...new Set(this.rows.map(row => row.finish_reason))].filter(Boolean);
    this.fields.end.replaceChildren(h("option", {value: ""}, "ended anyhow"),
      ...ends.map(end => h("option", {value: end}, `ended by ${end}`)),
      h("option", {value: "/none"}, "without a reward"));
    this.fields.end.value = ends.includes(before) ? before : "";
    this.count = PAGE;
    this.draw();
  }

  #accepts(row) {
    const {text, prompt, low, high, short: least, long, end} = this.fields;
    const within = (value, from, to) => (from.value === "" || (value !== null && value >= Number(from.value)))
      && (to.value === "" || (value !== null && value <= Number(to.value)));
    const words = text.value.toLowerCase();
    return within(row.reward, low, high) && within(row.num_response_tokens, least, long)
      && (prompt.value === "" || row.prompt_id === Number(prompt.value))
      && (!words || `${row.prompt} ${row.response} ${row.truth}`.toLowerCase().includes(words))
      && (!end.value || (end.value === "/none" ? row.reward === null : row.finish_reason === end.value));
  }

  draw() {
    const {low, high, by} = this.fields;
    const rows = this.only ? [this.only]
      : this.rows.filter(row => this.#accepts(row)).sort(BY[by.value]);
    this.rewards.replaceChildren(...histogram(this.rows, (from, to) => {
      [low.value, high.value] = [from, to].map(bound => String(Number(bound.toPrecision(6))));
      this.draw();
    }));
    this.note.replaceChildren(`${Math.min(this.count, rows.length)} of ${rows.length} that match, `
      + `${this.rows.length} here`, this.only ? h("button", {class: "small", onclick: () => this.#showAll()}, "all") : "");
    const shown = rows.slice(0, this.count);
    this.list.replaceChildren(...shown.flatMap((row, i) => [
      ...(by.value === "by prompt" && row.prompt_id !== shown[i - 1]?.prompt_id ? this.#groupLine(row) : []),
      this.#article(row)]));
    this.more.hidden = rows.length <= this.count;
    const name = this.fields.name.value, step = name ? stepOf(name) : -1;
    const errors = this.run.journal.notes.filter(note => note.step === step && note.name === "group_dropped");
    this.refused.replaceChildren(...errors.map(note => h("p", {class: "bad"}, `left out: ${note.text}`)));
  }

  #showAll() {
    history.replaceState(null, "", location.hash.split("?")[0] || "#");
    this.only = null;
    this.draw();
  }

  #groupLine(row) {
    if (!row.group || row.group.count < 2) return [];
    const {count, low, mean, high} = row.group;
    return [h("h3", {}, `prompt ${row.prompt_id}: ${count} samples, reward ${short(mean)} on average, ${short(low)} to `
      + short(high))];
  }

  // Returns how far a reward is from the mean of its group.
  #beside({reward, group}) {
    return reward === null || !group || group.count < 2 ? "" : `${signed(reward - group.mean)} beside its group · `;
  }

  #article(row) {
    const tokens = h("button", {class: "small"}, "token by token");
    const name = this.fields.name.value;
    const link = h("a", {class: "small", href: `#${encodeURIComponent(this.run.name)}?${name}/${row.row}`}, "link");
    const versions = h("div");
    const steps = name.startsWith("val") ? h("button", {class: "small", onclick: async () => {
      versions.replaceChildren(...await overSteps(this.source, this.run.name, this.names, row));
    }}, "over the steps") : "";
    const response = h("dd", {}, h("pre", {}, row.response));
    const article = h("article", {},
      h("div", {class: "facts"}, h("b", {}, row.reward === null ? "no reward" : short(row.reward)),
        h("span", {}, `${this.#beside(row)}prompt ${row.prompt_id}, sample ${row.sample_index} · `
          + `${row.num_response_tokens} tokens · `
          + (row.stop_reason ? `${row.num_turns} turns, ${row.num_tool_calls} tool calls · ` : "")
          + `${row.stop_reason || row.finish_reason} · v${row.policy_version} · ${row.server}`), link, steps, tokens),
      h("div", {class: "chips"}, ...Object.entries(row.components).map(([name, value]) =>
        h("span", {}, `${name} ${typeof value === "number" ? short(value) : value}`))),
      h("dl", {}, h("dt", {}, "prompt"), h("dd", {}, h("pre", {}, row.prompt)),
        h("dt", {}, "response"), response,
        ...(row.truth ? [h("dt", {}, "truth"), h("dd", {}, h("pre", {}, row.truth))] : [])), versions);
    tokens.addEventListener("click", async () => {
      tokens.disabled = true;
      const detail = await this.source.sample(this.run.name, name, row.row);
      response.replaceChildren(...tokenView(detail || {}));
    });
    return article;
  }
}

const stepOf = name => Number(name.split("_")[1]);
const titleOf = name => `${name.startsWith("val") ? "validation after step" : "step"} ${stepOf(name)}`;

// Shows the response with a colour for each token: how unlikely it was, or how much engine and learner differ.
function tokenView(detail) {
  const {tokens, engine, learner, mask, segments} = detail;
  const text = h("pre", {}, detail.response ?? "");
  if (!tokens || !engine) return [text, h("p", {class: "none"}, "no tokens were saved (trainer.save_tokens)")];
  const apart = learner && tokens.map((_, i) => Math.abs(engine[i] - learner[i]));
  const most = apart ? Math.max(...apart, 1e-9) : 0;
  const strengths = {
    "engine's log-prob": i => Math.min(1, -engine[i] / 5),
    ...(learner && {"learner's log-prob": i => Math.min(1, -learner[i] / 5),
      "their difference": i => apart[i] / most}),
  };
  // Text that the policy did not write is grey; a rule marks a new segment, which does not see earlier ones.
  const paint = by => text.replaceChildren(...tokens.flatMap((token, i) => {
    const rule = segments.includes(i) ? [h("span", {class: "segment"}, `segment ${segments.indexOf(i) + 2}`)] : [];
    if (!mask[i]) return [...rule, h("span", {class: "given"}, token)];
    const strength = Math.max(0, strengths[by](i)) * 0.75;
    const mark = h("span", {class: "token"}, token);
    mark.style.background = `color-mix(in srgb, var(--hot) ${Math.round(strength * 100)}%, transparent)`;
    mark.addEventListener("pointermove", event => showTip(event, h("b", {}, JSON.stringify(token)),
      h("p", {}, `engine ${short(engine[i])} (${short(Math.exp(engine[i]) * 100)} %)`),
      ...(learner ? [h("p", {}, `learner ${short(learner[i])}, apart ${short(apart[i])}`)] : [])));
    mark.addEventListener("pointerleave", hideTip);
    return [...rule, mark];
  }));
  const choice = h("select", {"aria-label": "what colours the tokens", onchange: () => paint(choice.value)},
    ...Object.keys(strengths).map(name => h("option", {}, name)));
  paint(choice.value);
  const told = learner ? `; they differ by at most ${short(most)}` : "";
  return [text, h("p", {class: "none"}, "coloured by ", choice, told)];
}
