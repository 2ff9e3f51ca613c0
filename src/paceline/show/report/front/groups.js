// Views of a step's samples together: a histogram of rewards, and an answer over the steps.

const NUM_BINS = 16;

// Draws a bar for each range of rewards; a click selects the range.
function histogram(rows, onRange) {
  const rewards = rows.map(row => row.reward).filter(reward => reward !== null);
  const low = Math.min(...rewards), high = Math.max(...rewards);
  if (rewards.length < 2 || !(high > low)) return [];
  const width = (high - low) / NUM_BINS, counts = Array(NUM_BINS).fill(0);
  for (const reward of rewards) counts[Math.min(NUM_BINS - 1, Math.floor((reward - low) / width))] += 1;
  const most = Math.max(...counts);
  const bars = counts.map((count, i) => {
    const [from, to] = [low + i * width, low + (i + 1) * width];
    const bar = h("button", {class: "bar", "aria-label": `${count} rewards from ${short(from)} to ${short(to)}`,
      title: `${short(from)} to ${short(to)}: ${count}`, onclick: () => onRange(from, to)});
    bar.style.setProperty("--high", String(count / most));
    return bar;
  });
  return [h("span", {}, short(low)), h("div", {class: "bars"}, ...bars), h("span", {}, short(high))];
}

const signed = value => `${value < 0 ? "−" : "+"}${short(Math.abs(value))}`;

// Shows the answers to a row's prompt in all validations, each with its changes from the one before.
async function overSteps(source, run, names, row) {
  const found = [];
  const validations = names.filter(other => other.startsWith("val")).sort((a, b) => stepOf(a) - stepOf(b));
  for (const name of validations) {
    const rows = await source.samples(run, name);
    const same = rows.find(other => other.prompt === row.prompt && other.sample_index === row.sample_index);
    if (same) found.push([name, same]);
  }
  return found.map(([name, same], i) => h("div", {class: "version"},
    h("i", {}, `after step ${stepOf(name)}: ${same.reward === null ? "no reward" : short(same.reward)}`),
    h("pre", {}, ...(i ? changes(found[i - 1][1].response, same.response) : [same.response]))));
}

// Returns the words of the later text, with added words marked and removed words struck out.
function changes(before, after) {
  const [a, b] = [before, after].map(text => text.split(/(\s+)/));
  const common = Array.from({length: a.length + 1}, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      common[i][j] = a[i] === b[j] ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
    }
  }
  const parts = [];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { parts.push(b[j]); i += 1; j += 1; }
    else if (j < b.length && (i >= a.length || common[i][j + 1] >= common[i + 1][j])) {
      parts.push(h("ins", {}, b[j]));
      j += 1;
    } else { parts.push(h("del", {}, a[i])); i += 1; }
  }
  return parts;
}
