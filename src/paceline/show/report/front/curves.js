// The curves of one run, or of several runs in the same charts.

const DASHES = ["none", "5 3", "2 2", "8 3 2 3"];
// Maxima and schedules are drawn unsmoothed: a mean of neighbours would be no value of theirs.
const EXACT = /(^|[/_])(max|min|lr|kl_coef)$|^perf\/memory/;

class Curves {
  constructor(meta, runs, onStep) {
    Object.assign(this, {meta, runs, onStep});
    this.several = runs.length > 1;
    this.reward = new Plot({...this.#spec(meta.reward), title: "Reward", height: 260});
    this.phases = this.several ? null : new Plot({title: "Seconds per phase", note: "mean over neighbours where steps "
      + "are many", stack: true, height: 240, onStep, lines: () => this.#phases()});
    this.cards = meta.charts.map(chart => new Plot({...this.#spec(chart), folds: true}));
    this.unchanged = h("p", {class: "none"});
    this.others = h("div", {class: "grid-of"});
    this.search = h("input", {type: "search", placeholder: "name of a metric", oninput: () => this.#drawOthers()});
    this.all = h("details", {ontoggle: () => this.#drawOthers()}, h("summary", {}, "All metrics"),
      h("div", {class: "filters"}, this.search), this.others);
    this.rewards = h("section", {}, h("h2", {}, "Reward"), this.reward.element);
    this.element = h("div", {}, this.rewards,
      this.phases && h("section", {}, h("h2", {}, "Where the time goes"), this.phases.element),
      h("section", {}, h("h2", {}, "Curves"),
        h("div", {class: "grid-of"}, ...this.cards.map(card => card.element)), this.unchanged, this.all));
  }

  #spec(chart) {
    return {title: chart.title, note: chart.note, onStep: this.onStep, notes: () => this.#notes(),
      lines: () => this.runs.flatMap((run, at) => this.#lines(run, at, chart))};
  }

  #notes() { return this.several ? new Map() : this.runs[0].notes(); }

  #lines(run, at, chart) {
    const components = chart.components ? this.#components(run, chart.metrics[0].name) : [];
    const sets = chart.components ? run.heldOut().filter(set => set.name).map(set => (
      {name: `${set.prefix}reward/mean`, label: `validation (${set.name})`, dots: true})) : [];
    const metrics = [...chart.metrics, ...sets, ...components];
    return metrics.map((metric, number) => {
      const points = run.points(metric.name);
      // A run without a reference or a penalty writes zeros.
      const none = chart.without_zeros && points.every(point => point[2] === 0);
      return {label: this.several ? `${run.name}${metrics.length > 1 ? ` ${metric.label}` : ""}` : metric.label,
        colour: this.several ? run.colour : colour(number), dots: metric.dots && points.length < 60,
        dash: this.several ? DASHES[number % DASHES.length] : "none", exact: EXACT.test(metric.name),
        points: none ? [] : points};
    });
  }

  // Returns the components of the reward, without one that equals the reward: their lines would coincide.
  #components(run, total) {
    const totals = new Map(run.points(total).map(point => [point[0], point[2]]));
    return run.names().filter(name => /^reward\/.+\/mean$/.test(name))
      .filter(name => !run.points(name).every(([step, , value]) => Math.abs(value - totals.get(step)) <= 1e-6))
      .map(name => ({name, label: name.slice("reward/".length, -"/mean".length)}));
  }

  // Charts whose lines never change are listed in one line of text; a click shows such a chart.
  #drawUnchanged() {
    const folded = this.cards.filter(card => card.folded);
    this.unchanged.hidden = !folded.length;
    this.unchanged.replaceChildren("Never changed: ", ...folded.flatMap((card, i) => [i ? ", " : "",
      h("button", {class: "small", onclick: () => { card.unfold(); this.#drawUnchanged(); }}, card.title),
      ` ${[...new Set(card.drawn.map(line => short(line.points[0][2])))].join(" and ")}`]));
  }

  #phases() {
    const run = this.runs[0], claimed = new Map();
    const lines = this.meta.phases.map((metric, number) => {
      const points = run.points(metric.name);
      for (const [step, , value] of points) claimed.set(step, (claimed.get(step) || 0) + value);
      return {label: metric.label, colour: colour(number), points: points.some(p => p[2] > 0) ? points : []};
    });
    const other = run.points(this.meta.step_seconds).map(([step, hours, value]) =>
      [step, hours, Math.max(0, value - (claimed.get(step) || 0))]);
    return [...lines, {label: "other", colour: "var(--soft)", points: other}];
  }

  #drawOthers() {
    if (!this.all.open) return;
    const names = [...new Set(this.runs.flatMap(run => run.names()))]
      .filter(name => name.includes(this.search.value.trim())).slice(0, 24);
    this.others.replaceChildren(...names.map(name =>
      new Plot(this.#spec({title: name, note: "", metrics: [{name, label: "value"}]})).element));
  }

  draw() {
    Plot.drawAll();
    this.rewards.hidden = this.reward.element.hidden;
    this.#drawUnchanged();
  }
}
