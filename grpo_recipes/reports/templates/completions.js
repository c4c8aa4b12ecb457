"use strict";
// Filters the completions of the page. Texts of a run reach the page through textContent alone, never as HTML.
const PER_PAGE = 24;
const VERDICTS = 100;
const [STEP, PROMPT, TEXT, GOLD, VERDICT, ADVANTAGE, TOTAL] = [0, 1, 2, 3, 4, 5, 6];

const byId = id => document.getElementById(id);
const prompts = [];
const rows = [];
let names = { rewards: [] };
let found = [];
let first = 0;

async function read() {
  const packed = Uint8Array.from(atob(byId("data").textContent), character => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const [head, ...items] = JSON.parse(await new Response(stream).text());
  names = head;
  for (const item of items) (typeof item === "string" ? prompts : rows).push(item);
  // A transcript is a list of kind, heading and text of each part.
  for (const row of rows) row.words = typeof row[TEXT] === "string" ? row[TEXT] : row[TEXT].map(part => `${part[1]}\n${part[2]}`).join("\n");
  rows.sort((one, other) => one[STEP] - other[STEP]);
}

function addOption(select, value, text) {
  const option = document.createElement("option");
  option.value = value;
  option.textContent = text;
  select.append(option);
}

function fillFilters() {
  addOption(byId("reward"), TOTAL, "total");
  names.rewards.forEach((name, place) => addOption(byId("reward"), TOTAL + 1 + place, name));
  const counts = new Map();
  for (const row of rows) if (row[VERDICT]) counts.set(row[VERDICT], (counts.get(row[VERDICT]) || 0) + 1);
  const frequent = [...counts].sort((one, other) => other[1] - one[1]).slice(0, VERDICTS);
  for (const [verdict, count] of frequent) addOption(byId("verdict"), verdict, `${verdict} (${count.toLocaleString("en")})`);
  byId("verdict").closest("label").hidden = !counts.size;
  for (const id of ["step-from", "step-to"]) {
    byId(id).min = rows[0][STEP];
    byId(id).max = rows[rows.length - 1][STEP];
    byId(id).placeholder = id === "step-from" ? byId(id).min : byId(id).max;
  }
}

function bound(id, otherwise) {
  return byId(id).value === "" ? otherwise : Number(byId(id).value);
}

function filter() {
  const wanted = byId("search").value.toLowerCase();
  const verdict = byId("verdict").value;
  const reward = Number(byId("reward").value);
  const [stepFrom, stepTo] = [bound("step-from", -Infinity), bound("step-to", Infinity)];
  const [low, high] = [bound("reward-from", -Infinity), bound("reward-to", Infinity)];
  const isBounded = low > -Infinity || high < Infinity;
  const matches = prompts.map(prompt => prompt.toLowerCase().includes(wanted));
  found = rows.filter(row =>
    row[STEP] >= stepFrom && row[STEP] <= stepTo
    && (!verdict || row[VERDICT] === verdict)
    && (!isBounded || (row[reward] !== null && row[reward] >= low && row[reward] <= high))
    && (matches[row[PROMPT]] || row.words.toLowerCase().includes(wanted) || row[GOLD].toLowerCase().includes(wanted)));
  const order = byId("order").value;
  // A completion without a score comes last, whichever the order.
  const value = (row, missing) => row[reward] === null ? missing : row[reward];
  if (order === "highest") found.sort((one, other) => value(other, -Infinity) - value(one, -Infinity) || 0);
  if (order === "lowest") found.sort((one, other) => value(one, Infinity) - value(other, Infinity) || 0);
  if (order === "longest") found.sort((one, other) => other.words.length - one.words.length);
  first = 0;
  show();
}

function element(tag, name, ...inside) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(...inside);
  return made;
}

function completion(text) {
  const shown = element("pre", "completion", text);
  shown.tabIndex = 0;
  return shown;
}

function transcript(parts) {
  return parts.map(([kind, label, text]) => element("div", `said ${kind}`, element("p", "label", label), completion(text)));
}

function chip(name, value) {
  return element("li", "", `${name} `, element("strong", "", value));
}

function card(row) {
  const chips = element("ul", "chips");
  if (row[GOLD]) chips.append(chip("gold", row[GOLD]));
  if (row[VERDICT]) chips.append(chip("verdict", row[VERDICT]));
  names.rewards.forEach((name, place) => chips.append(chip(name, String(row[TOTAL + 1 + place] ?? "–"))));
  chips.append(chip("total", String(row[TOTAL] ?? "–")));
  if (row[ADVANTAGE] !== null) chips.append(chip("advantage", row[ADVANTAGE].toFixed(2)));
  const prompt = element("pre", "prompt", prompts[row[PROMPT]]);
  prompt.tabIndex = 0;
  const isPlain = typeof row[TEXT] === "string";
  const length = `Completion, ${row.words.length.toLocaleString("en")} characters`;
  return element(
    "article", "card",
    element("h2", "", `Step ${row[STEP]}`),
    element("div", "", element("p", "label", "Prompt"), prompt),
    element("div", "", element("p", "label", length), ...(isPlain ? [completion(row[TEXT])] : transcript(row[TEXT]))),
    chips,
  );
}

function show() {
  const shown = found.slice(first, first + PER_PAGE);
  byId("cards").replaceChildren(...shown.map(card));
  const range = shown.length ? `, ${first + 1} to ${first + shown.length} shown` : "";
  byId("count").textContent = `${found.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} completions${range}`;
  byId("previous").hidden = first === 0;
  byId("next").hidden = first + PER_PAGE >= found.length;
}

function turn(by) {
  first += by;
  show();
  byId("found").scrollIntoView();
  byId("found").focus({ preventScroll: true });
}

let waiting = 0;
function filterSoon() {
  clearTimeout(waiting);
  waiting = setTimeout(filter, 150);
}

read().then(() => {
  fillFilters();
  filter();
  byId("filters").addEventListener("input", filterSoon);
  byId("filters").addEventListener("reset", filterSoon);
  byId("filters").addEventListener("submit", event => event.preventDefault());
  byId("previous").addEventListener("click", () => turn(-PER_PAGE));
  byId("next").addEventListener("click", () => turn(PER_PAGE));
}).catch(error => {
  byId("count").textContent = `The completions can't be read (${error.message}): open the page in a browser of 2023 or later.`;
});
