// The validations: of one run a table over its steps for each set, of several a table of the sets over the runs.

class Evaluations {
  constructor(runs, onStep) {
    Object.assign(this, {runs, onStep});
    this.element = h("section", {id: "evaluations", hidden: true});
  }

  draw() {
    const parts = this.runs.length > 1 ? this.#compared() : this.runs[0].heldOut().map(set => this.#ofSet(set));
    this.element.hidden = !parts.length;
    this.element.replaceChildren(h("h2", {}, "Evaluations"), ...parts);
  }

  // The mean reward at a step, with its interval where the run has one.
  #reward(run, set, step) {
    const at = name => this.#at(run, `${set.prefix}reward/${name}`, step);
    const [mean, low, high] = ["mean", "low", "high"].map(at);
    return low === undefined ? mean.toFixed(3) : `${mean.toFixed(3)} [${low.toFixed(3)}, ${high.toFixed(3)}]`;
  }

  #at(run, name, step) { return run.points(name).find(point => point[0] === step)?.[2]; }

  #best(run, set) {
    return run.points(`${set.prefix}reward/mean`).reduce((best, point) => point[2] > best[2] ? point : best);
  }

  #ofSet(set) {
    const [run] = this.runs, [best] = this.#best(run, set);
    const rates = run.names().map(name => name.startsWith(set.prefix) && name.slice(set.prefix.length))
      .filter(name => /^(avg|pass|maj)_at_\d+$/.test(name))
      .sort((a, b) => a.localeCompare(b, "en", {numeric: true}));
    const columns = [...rates.map(name => [name.replace("_at_", "@"), name, 3]),
      ["cut off", "cut_off", 3], ["tokens", "response_length/mean", 0], ["prompts", "num_prompts", 0]]
      .filter(([, name]) => run.points(set.prefix + name).length);
    const rows = run.points(`${set.prefix}reward/mean`).map(([step]) => h("tr", {},
      h("td", {}, h("button", {class: "small", onclick: () => this.onStep(step)}, String(step))),
      h("td", {}, h(step === best ? "b" : "span", {}, this.#reward(run, set, step))),
      ...columns.map(([, name, digits]) =>
        h("td", {}, this.#at(run, set.prefix + name, step)?.toFixed(digits) ?? ""))));
    return h("div", {class: "scroll few"}, h("table", {}, h("caption", {}, set.name || "data.val_files"),
      h("thead", {}, h("tr", {}, ...["step", "reward", ...columns.map(([title]) => title)].map(t => h("th", {}, t)))),
      h("tbody", {}, ...rows)));
  }

  #compared() {
    const sets = new Map(this.runs.flatMap(run => run.heldOut()).map(set => [set.name, set]));
    const rows = [...sets.values()].map(set => h("tr", {}, h("td", {}, set.name || "data.val_files"),
      ...this.runs.map(run => h("td", {}, ...this.#summary(run, set)))));
    if (!rows.length) return [];
    return [h("div", {class: "scroll"}, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "set"),
      ...this.runs.map(run => h("th", {}, run.name)))), h("tbody", {}, ...rows)))];
  }

  // The first, the best and the last.
  #summary(run, set) {
    const points = run.points(`${set.prefix}reward/mean`);
    if (!points.length) return ["–"];
    const steps = [points[0][0], this.#best(run, set)[0], points.at(-1)[0]];
    return ["first", "best", "last"].map((word, i) =>
      h("div", {}, h("i", {}, `${word}, step ${steps[i]}: `), this.#reward(run, set, steps[i])));
  }
}
