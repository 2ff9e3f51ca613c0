// The validations: a table per set, with the steps of one run or a comparison of several runs.

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

  // Returns the mean reward at a step, with its interval if the run has one.
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
    return this.#table(set, "step", run.points(`${set.prefix}reward/mean`).map(([step]) => ({
      run, step, best: step === best,
      head: h("button", {class: "small", onclick: () => this.onStep(step)}, String(step)),
    })));
  }

  // Shows the first, the best and the last validation of each run.
  #compared() {
    const sets = new Map(this.runs.flatMap(run => run.heldOut()).map(set => [set.name, set]));
    return [...sets.values()].map(set => this.#table(set, "run", this.runs.flatMap(run => this.#summary(run, set))));
  }

  #summary(run, set) {
    const points = run.points(`${set.prefix}reward/mean`);
    if (!points.length) return [{run, head: run.name}];
    const steps = {first: points[0][0], best: this.#best(run, set)[0], last: points.at(-1)[0]};
    return [...new Set(Object.values(steps))].map(step => {
      const words = Object.keys(steps).filter(word => steps[word] === step).join(", ");
      return {run, step, best: step === steps.best, head: `${run.name}: ${words}, step ${step}`};
    });
  }

  // Makes a row per entry; an entry without a step stands for a run that has not answered the set.
  #table(set, title, entries) {
    const columns = this.#columns(set);
    const rows = entries.map(({run, step, best, head}) => h("tr", {}, h("td", {}, head),
      h("td", {}, step === undefined ? "–" : h(best ? "b" : "span", {}, this.#reward(run, set, step))),
      ...columns.map(([, name, digits]) =>
        h("td", {}, this.#at(run, set.prefix + name, step)?.toFixed(digits) ?? ""))));
    return h("div", {class: "scroll few"}, h("table", {}, h("caption", {}, set.name || "data.val_files"),
      h("thead", {}, h("tr", {}, ...[title, "reward", ...columns.map(([title]) => title)].map(t => h("th", {}, t)))),
      h("tbody", {}, ...rows)));
  }

  // Returns title, name and digits of each number that any of the runs has for a set.
  #columns(set) {
    const names = new Set(this.runs.flatMap(run => run.names()).filter(name => name.startsWith(set.prefix))
      .map(name => name.slice(set.prefix.length)));
    const rates = [...names].filter(name => /^(avg|pass|maj)_at_\d+$/.test(name))
      .sort((a, b) => a.localeCompare(b, "en", {numeric: true}));
    return [...rates.map(name => [name.replace("_at_", "@"), name, 3]),
      ["cut off", "cut_off", 3], ["tokens", "response_length/mean", 0], ["prompts", "num_prompts", 0]]
      .filter(([, name]) => this.runs.some(run => run.points(set.prefix + name).length));
  }
}
