"use strict";
/* What goes on at this server, a second old at most, and a chat. Everything that comes from the server is put on the page
   as text, never as markup. */

const EVERY_MS = 1000, EVERY_HIDDEN_MS = 10000, PATIENCE_MS = 5000;
const MAX_REQUESTS = 100, MAX_ROWS = 12;
const KEY = "splitserve-api-key";
const NO_NODE = "no_node";
const TITLES = {
  prefill_queue: "prefill queue", prefill: "prefill", kv_alloc: "KV alloc", kv_transfer: "KV transfer",
  decode_queue: "decode queue", decode: "decode", no_node: "node wait",
};
const PREFILLING = new Set(["prefill_queue", "prefill"]);
const $ = (id) => document.getElementById(id);

// ---- elements and words ----

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const element = (name, attributes = {}, ...children) => filled(document.createElement(name), attributes, children);
const drawn = (name, attributes = {}, ...children) =>
  filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
const cell = (text, kind = "") => element("td", kind ? {class: kind} : {}, text);
const number = (text) => cell(text, "number");

function short(value) {
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]])
    if (value >= size * 0.9995) return `${Number((value / size).toPrecision(3))}${unit}`;
  return value >= 10 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1);
}

function time(seconds) {
  if (seconds < 0.00995) return `${(seconds * 1e3).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${(seconds * 1e3).toFixed(0)} ms`;
  return seconds < 99.95 ? `${seconds.toFixed(seconds < 9.995 ? 2 : 1)} s` : `${seconds.toFixed(0)} s`;
}

function duration(seconds) {
  for (const [unit, size, part, partSize] of [["d", 86400, "h", 3600], ["h", 3600, "min", 60], ["min", 60, "s", 1]])
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ${Math.floor((seconds % size) / partSize)} ${part}`;
  return `${seconds.toFixed(0)} s`;
}

function elided(name, most) { // names often differ at their ends alone: what is left out is in the middle
  const first = Math.floor((most - 1) / 3);
  return name.length > most ? `${name.slice(0, first)}…${name.slice(first + 1 - most)}` : name;
}

const share = (part, all) => (all ? `${Math.round((100 * part) / all)} %` : "–");
const moment = (value) => (value ? time(value) : "–");

// ---- asking the server ----

const world = {overview: null, after: 0, ended: [], chosen: null};

function asking(headers = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? {...headers, authorization: `Bearer ${key}`} : headers;
}

function tell(text, kind) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").className = `state ${kind}`;
}

async function poll() {
  try {
    const response = await fetch(`ui/overview?after=${world.after}`, {
      headers: asking(), signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store",
    });
    if (response.status === 401) {
      tell("needs an API key", "ill");
      askForKey(sessionStorage.getItem(KEY) ? "The server does not know this key." : "");
      return; // until there is another one
    }
    if (!response.ok) throw new Error(`status ${response.status}`);
    take(await response.json());
    tell("live", "well");
  } catch {
    tell("the server does not answer", "ill");
  }
  setTimeout(poll, document.hidden ? EVERY_HIDDEN_MS : EVERY_MS);
}

function take(overview) {
  if (world.overview && overview.uptime_s < world.overview.uptime_s) world.ended = []; // it has been started again
  world.overview = overview;
  world.ended = [...world.ended, ...overview.ended].slice(-MAX_REQUESTS);
  world.after = world.ended.length ? Number(world.ended.at(-1).number) : 0;
  show();
}

const requests = () => [...world.ended, ...world.overview.live];
const requestOf = (sequenceId) => requests().findLast((request) => request.sequence_id === sequenceId);

// ---- the overview ----

function show() {
  const {overview} = world;
  const all = overview.nodes.length;
  const about = `${overview.served_model_name} · ${all} node${all === 1 ? "" : "s"} · up ${duration(overview.uptime_s)}`;
  $("about").textContent = about;
  document.title = `${overview.served_model_name} · SplitServe`;
  showTiles(overview);
  showPhases(overview.phases);
  $("nodes").replaceChildren(...overview.nodes.map(nodeRow));
  if (!all) $("nodes").append(element("tr", {}, element("td", {colspan: 11, class: "bad"}, "no node is attached")));
  $("window").textContent = `requests that have ended within ${overview.window_s} s`;
  $("times").replaceChildren(...overview.times.map(timesRow));
  if (!overview.times.length) $("times").append(element("tr", {}, element("td", {colspan: 10, class: "dim"}, "none yet")));
  showLives();
  for (const spent of document.querySelectorAll(".spent")) showSpent(spent);
}

function tile(title, value, unit = "", below = "") {
  const all = element("dl", {class: "tile"}, element("dt", {}, title), element("dd", {}, value, element("small", {}, unit)));
  if (below) all.append(element("dd", {class: "below"}, below));
  return all;
}

function showTiles({rates, phases, recent_tokens_per_s: recent, times: [all]}) {
  const live = phases.reduce((sum, each) => sum + each.num_sequences, 0);
  const generated = tile("generation tokens", short(rates.tokens_per_s), "/s");
  generated.classList.add("wide-tile");
  const box = element("div", {});
  box.append(...generated.children);
  generated.append(box, spark(recent));
  const middle = (value) => (value ? time(value.p50) : "–");
  const tail = (value) => (value ? `p99 ${time(value.p99)}` : "");
  $("tiles").replaceChildren(
    generated, tile("prompt tokens", short(rates.prompt_tokens_per_s), "/s"), tile("requests", short(rates.requests_per_s), "/s"),
    tile("live", String(live)), tile("TTFT p50", middle(all?.ttft_s), "", tail(all?.ttft_s)),
    tile("TPOT p50", middle(all?.tpot_s), "", tail(all?.tpot_s)),
  );
}

function spark(values) {
  const most = Math.max(1, ...values), width = 120;
  const points = values.map((value, i) => `${width - values.length + i + 1},${(24 - (22 * value) / most).toFixed(1)}`);
  const label = `tokens a second over the last ${values.length} s, at most ${short(most)}`;
  const svg = drawn("svg", {viewBox: `0 0 ${width} 26`, preserveAspectRatio: "none", role: "img", "aria-label": label});
  if (points.length > 1) {
    const area = `${width - values.length + 1},26 ${points.join(" ")} ${width},26`;
    svg.append(drawn("polygon", {points: area, class: "spark-area"}), drawn("polyline", {points: points.join(" "), class: "spark"}));
  }
  return svg;
}

function showPhases(phases) {
  const all = phases.reduce((sum, each) => sum + each.num_sequences, 0);
  $("phase-bar").replaceChildren(...phases.filter((each) => each.num_sequences).map((each) => {
    const part = element("i", {class: each.phase});
    part.style.width = `${(100 * each.num_sequences) / all}%`;
    return part;
  }));
  $("phases").replaceChildren(...phases.map((each) =>
    element("li", {}, element("i", {class: `mark ${each.phase}`}), TITLES[each.phase] ?? each.phase,
      element("b", {}, String(each.num_sequences)))));
}

function nodeRow(node) {
  const {load} = node, {shape} = load;
  const used = load.num_blocks ? 1 - load.num_blocks_free / load.num_blocks : 0;
  const meter = element("meter", {min: 0, max: 1, low: 0.7, high: 0.9, optimum: 0, value: used, "aria-label": "KV cache usage"});
  const role = load.state === "ready" ? cell(load.role) : element("td", {}, load.role, element("span", {class: "warn"}, ` ${load.state}`));
  return element("tr", {}, element("th", {scope: "row", title: load.name}, elided(load.name, 32)), role,
    number(shape.prompt_tokens ? short(shape.prompt_tokens) : "–"), number(short(node.num_tokens_to_compute)),
    number(shape.slots ? `${node.num_sequences} / ${shape.slots}` : "–"), number(String(node.num_incoming)),
    element("td", {}, meter, share(used, 1)), number(share(Number(load.num_cached_tokens), Number(load.num_prompt_tokens))),
    number(short(node.prompt_tokens_per_s)), number(short(node.tokens_per_s)), number(time(load.step_s)));
}

function timesRow(row) {
  const three = (value) => ["p50", "p90", "p99"].map((name) => number(value ? time(value[name]) : "–"));
  const kept = row.num_limited ? row.num_met / row.num_limited : 1;
  const colour = !row.num_limited ? "dim" : kept >= 0.95 ? "good" : kept >= 0.8 ? "warn" : "bad";
  return element("tr", {}, element("th", {scope: "row"}, row.slo_class || "all"), cell(row.limits, "dim"),
    number(String(row.num_sequences)), ...three(row.ttft_s), ...three(row.tpot_s),
    cell(share(row.num_met, row.num_limited), `number ${colour}`));
}

// ---- request history ----

function piecesOf(request) { // what it did on one node without a break
  const pieces = [];
  for (const span of request.spans) {
    const node = (PREFILLING.has(span.phase) ? span.prefill_node : span.decode_node) || NO_NODE;
    const begin = request.start_s + span.begin_s, end = request.start_s + span.end_s;
    const last = pieces.at(-1);
    if (last?.node === node) {
      last.end = end;
      last.spans.push(span);
    } else pieces.push({request, node, begin, end, spans: [span]});
  }
  return pieces;
}

function pack(pieces) { // gives each a row where nothing else is at its time; the number of rows
  const ends = [];
  for (const piece of pieces.sort((a, b) => a.begin - b.begin)) {
    let row = ends.findIndex((end) => end <= piece.begin);
    if (row < 0) row = ends.length < MAX_ROWS ? ends.length : ends.indexOf(Math.min(...ends));
    ends[row] = piece.end;
    piece.row = row;
  }
  return Math.max(1, ends.length);
}

function joint(from, to) { // why a request went from one node to another
  if (PREFILLING.has(to.spans[0].phase)) return "restart";
  return from.spans.at(-1).phase === "decode" ? "migration" : "transfer";
}

function lanesOf(pieces) { // the nodes there are, and those that were there, each with its pieces
  const roles = new Map(world.overview.nodes.map(({load}) => [load.name, load.role]));
  const lanes = new Map([...roles.keys()].map((name) => [name, []]));
  for (const piece of pieces) {
    if (!lanes.has(piece.node)) lanes.set(piece.node, []);
    lanes.get(piece.node).push(piece);
  }
  const order = (name) => `${name === NO_NODE ? 2 : roles.get(name) === "prefill" || /^prefill/.test(name) ? 0 : 1}${name}`;
  return [...lanes].sort(([a], [b]) => (order(a) < order(b) ? -1 : 1));
}

function drawRequests(svg, drawnRequests, begin, end, {row, isAlone = false}) {
  const gutter = 104, gap = 2, pad = 5, width = Math.max(320, svg.clientWidth || svg.parentElement.clientWidth);
  const x = (at) => gutter + ((width - gutter - 6) * (at - begin)) / (end - begin);
  const clamp = (at) => x(Math.min(end, Math.max(begin, at)));
  const chains = drawnRequests.map((request) => piecesOf(request).filter((piece) => piece.end > begin && piece.begin < end));
  const used = lanesOf(chains.flat()).filter(([, pieces]) => pieces.length || !isAlone);
  const back = drawn("g"), joints = drawn("g"), front = drawn("g");
  const present = new Set(world.overview.nodes.map(({load}) => load.name));
  let y = 0;
  for (const [name, pieces] of used) {
    const height = pack(pieces) * (row + gap) - gap + 2 * pad;
    back.append(drawn("rect", {class: "lane", x: gutter, y, width: width - gutter, height, rx: 4}));
    const label = name === NO_NODE ? "node wait" : elided(name, 15);
    back.append(drawn("text", {class: present.has(name) ? "node" : "node gone", x: 0, y: y + height / 2 + 4}, label,
      drawn("title", {}, present.has(name) || name === NO_NODE ? name : `${name}: is not there any more`)));
    for (const piece of pieces) {
      piece.y = y + pad + piece.row * (row + gap);
      front.append(drawPiece(piece, clamp, row));
    }
    y += height + 4;
  }
  for (const chain of chains) chain.slice(1).forEach((to, i) => joints.append(drawJoint(chain[i], to, clamp, row)));
  back.append(ticks(begin, end, x, y, isAlone));
  svg.setAttribute("viewBox", `0 0 ${width} ${y + 16}`);
  svg.setAttribute("height", y + 16);
  svg.replaceChildren(back, joints, front);
}

function drawPiece(piece, clamp, height) {
  const {request} = piece;
  const isFaint = world.chosen && world.chosen !== request.sequence_id;
  const group = drawn("g", {class: isFaint ? "piece faint" : "piece", "data-sequence": request.sequence_id});
  for (const span of piece.spans) {
    const from = clamp(request.start_s + span.begin_s), to = clamp(request.start_s + span.end_s);
    if (to <= from) continue;
    const thin = span.phase.endsWith("_queue") || span.phase === "kv_alloc";
    const of = {x: from, y: piece.y + (thin ? height / 4 : 0), width: Math.max(1.5, to - from), height: thin ? height / 2 : height};
    group.append(drawn("rect", {class: piece.node === NO_NODE ? NO_NODE : span.phase, rx: 1.5, ...of},
      drawn("title", {}, `${request.sequence_id}: ${TITLES[span.phase]} on ${piece.node}, ${time(span.end_s - span.begin_s)}`)));
  }
  return group;
}

function drawJoint(from, to, clamp, height) {
  const [x0, y0, x1, y1] = [clamp(from.end), from.y + height / 2, clamp(to.begin), to.y + height / 2];
  const bend = Math.max(8, (x1 - x0) / 2);
  const isFaint = world.chosen && world.chosen !== from.request.sequence_id;
  const d = `M${x0} ${y0}C${x0 + bend} ${y0} ${x1 - bend} ${y1} ${x1} ${y1}`;
  return drawn("path", {class: `joint ${joint(from, to)}${isFaint ? " faint" : ""}`, d});
}

function ticks(begin, end, x, height, isAlone) {
  const group = drawn("g"), length = end - begin, most = Math.min(8, Math.floor((x(end) - x(begin)) / 56));
  const step = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120].find((s) => length / s <= most) ?? 300;
  const origin = isAlone ? begin : end;
  for (let i = 0; Math.abs(i) * step <= length * 1.0001; i += isAlone ? 1 : -1) {
    const at = x(origin + i * step), text = isAlone ? (i ? time(i * step) : "0") : i ? `${i * step} s` : "now";
    const anchor = at > x(end) - 24 ? "end" : "middle";
    group.append(drawn("line", {class: "tick", x1: at, x2: at, y1: 0, y2: height}),
      drawn("text", {x: at, y: height + 12, "text-anchor": anchor}, text));
  }
  return group;
}

function showLives() {
  const {overview} = world, length = Number($("seconds").value);
  drawRequests($("picture"), requests(), overview.now_s - length, overview.now_s, {row: 7});
  const body = $("requests"), rows = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const wanted = requests().toReversed();
  wanted.forEach((request, i) => {
    const row = rows.get(keyOf(request)) ?? requestRow(request);
    rows.delete(keyOf(request));
    fillRequestRow(row, request);
    if (body.rows[i] !== row) body.insertBefore(row, body.rows[i] ?? null);
  });
  for (const row of rows.values()) row.remove();
  const buttons = [...body.querySelectorAll("button")];
  if (!buttons.some((button) => button.tabIndex === 0) && buttons.length) buttons[0].tabIndex = 0;
  showRequest();
}

// An answer's id may come again: of a client that goes on with it, or that asks once more.
const keyOf = (request) => `${request.sequence_id} ${request.start_s}`;

function requestRow(request) {
  const button = element("button", {type: "button", tabindex: -1});
  button.textContent = elided(request.sequence_id, 22);
  button.title = request.sequence_id;
  const row = element("tr", {"data-sequence": request.sequence_id, "data-key": keyOf(request)}, element("td", {}, button));
  for (const kind of ["", "number", "number", "number", "number", "number", ""]) row.append(cell("", kind));
  return row;
}

function fillRequestRow(row, request) {
  const isGood = ["", "stop", "length"].includes(request.end);
  const value = [request.end || "live", short(request.prompt_tokens), short(request.completion_tokens), moment(request.ttft_s),
    moment(request.tpot_s), time(request.spans.at(-1)?.end_s ?? 0), wayOf(request)];
  value.forEach((text, i) => {
    if (row.cells[i + 1].textContent !== text) row.cells[i + 1].textContent = text;
  });
  row.cells[1].className = isGood ? "" : request.end === "abort" ? "dim" : "bad";
  row.className = world.chosen === request.sequence_id ? "chosen" : "";
  row.cells[0].firstChild.setAttribute("aria-pressed", world.chosen === request.sequence_id);
}

const wayOf = (request) => piecesOf(request).map((piece) => (piece.node === NO_NODE ? "node wait" : piece.node)).join(" → ");

function choose(sequenceId) {
  world.chosen = world.chosen === sequenceId ? null : sequenceId;
  for (const button of $("requests").querySelectorAll("button"))
    button.tabIndex = button.closest("tr").dataset.sequence === sequenceId ? 0 : -1;
  showLives();
}

function showRequest() {
  const request = world.chosen && requestOf(world.chosen);
  if (!request) {
    $("request").replaceChildren();
    return;
  }
  if ($("request").dataset.shown === `${request.sequence_id} ${request.end}` && request.end && $("request").firstChild) return;
  $("request").dataset.shown = `${request.sequence_id} ${request.end}`;
  drawAlone($("request"), request);
}

function drawAlone(box, request) { // one request: its phases in figures, and its picture
  const length = Math.max(0.001, request.spans.at(-1)?.end_s ?? 0);
  const svg = drawn("svg", {role: "img", "aria-label": `Where the time of ${request.sequence_id} went: the figures above`});
  box.replaceChildren(facts(request), svg);
  const chosen = world.chosen;
  world.chosen = null; // nothing is faint here
  drawRequests(svg, [request], request.start_s, request.start_s + length, {row: 14, isAlone: true});
  world.chosen = chosen;
}

function facts(request) {
  const seconds = new Map();
  for (const span of request.spans) {
    const phase = PREFILLING.has(span.phase) && !span.prefill_node ? NO_NODE : span.phase;
    seconds.set(phase, (seconds.get(phase) ?? 0) + span.end_s - span.begin_s);
  }
  const line = element("p", {class: "facts"});
  const add = (name, value, mark) => {
    line.append(...(mark ? [element("i", {class: `mark ${mark}`})] : []), `${name} `, element("b", {}, value));
  };
  for (const phase of Object.keys(TITLES)) if (seconds.has(phase)) add(TITLES[phase], time(seconds.get(phase)), phase);
  add("TTFT", moment(request.ttft_s));
  add("TPOT", moment(request.tpot_s));
  add("tokens", `${request.prompt_tokens} + ${request.completion_tokens}`);
  if (request.cached_tokens) add("cached", String(request.cached_tokens));
  if (Number(request.kv_bytes)) add("KV sent", `${short(Number(request.kv_bytes))}B`);
  if (request.num_migrations) add("migrations", `${request.num_migrations}, paused ${time(request.migration_pause_s)}`);
  if (request.num_restarts) add("restarts", String(request.num_restarts));
  for (const limit of ["ttft", "tpot"])
    if (request.attainment?.[`${limit}_ms`] !== undefined)
      add(`${limit.toUpperCase()} SLO`, `${request.attainment[`${limit}_ms`]} ms ${request.attainment[`${limit}_met`] ? "attained" : "missed"}`);
  return line;
}

$("picture").addEventListener("click", (event) => {
  const piece = event.target.closest("[data-sequence]");
  if (piece) choose(piece.dataset.sequence);
});
$("seconds").addEventListener("change", () => world.overview && showLives());
$("requests").addEventListener("click", (event) => {
  const row = event.target.closest("tr");
  if (row) choose(row.dataset.sequence);
});
$("requests").addEventListener("keydown", (event) => { // one stop for Tab, arrows within
  const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
  const row = event.target.closest("tr");
  const other = step > 0 ? row?.nextElementSibling : row?.previousElementSibling;
  if (!step || !other) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  const button = other.querySelector("button");
  button.tabIndex = 0;
  button.focus();
});

// ---- chat ----

const chat = {messages: [], call: null};

function say(kind, text = "") {
  const message = element("div", {class: `message ${kind}`}, text);
  const isAtEnd = $("messages").scrollHeight - $("messages").scrollTop - $("messages").clientHeight < 60;
  $("messages").append(message);
  if (isAtEnd || kind === "user") message.scrollIntoView({block: "nearest"});
  return message;
}

function showSpent(spent) { // redrawn until the answer has ended
  const request = requestOf(`${spent.dataset.id}/0`);
  if (!request || (spent.dataset.end && spent.dataset.end === request.end)) return;
  spent.dataset.end = request.end;
  drawAlone(spent, request);
}

async function* events(body) { // of a stream of server-sent events, what each brings
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

const OPENS = /^ {0,3}```[^`]*$/, CLOSES = /^ {0,3}```\s*$/, MAY_FENCE = /^ {0,3}(`{0,2}$|```)/;

function writer(answer) { // of its text as it comes; what stands between lines of ``` is code
  let code = null, line = "", numTold = 0; // of the last line, characters that are shown
  const isFence = () => (code ? CLOSES : OPENS).test(line.trimEnd());
  const tell = () => {
    (code ?? answer).append(line.slice(numTold));
    numTold = line.length;
  };
  const write = (text) => {
    for (const piece of text.split(/(?<=\n)/)) {
      line += piece;
      const isWhole = line.endsWith("\n");
      if (!isWhole && !numTold && MAY_FENCE.test(line)) continue;
      if (isWhole && !numTold && isFence()) {
        code = code ? null : element("code");
        if (code) answer.append(element("pre", {}, code));
      } else {
        tell();
      }
      if (isWhole) [line, numTold] = ["", 0];
    }
  };
  const end = () => {
    if (!(code && isFence())) tell();
  };
  return {write, end};
}

async function ask(question) {
  const id = `ui-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
  const {messages} = chat;
  messages.push({role: "user", content: question});
  say("user", question);
  const answer = say("assistant"), spent = element("div", {class: "spent", "data-id": id});
  $("messages").append(spent);
  chat.call = new AbortController();
  setAsking(true);
  const content = writer(answer), system = $("system").value.trim();
  const sent = system ? [{role: "system", content: system}, ...messages] : messages;
  let text = "";
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", signal: chat.call.signal,
      headers: asking({"content-type": "application/json", "x-request-id": id}),
      body: JSON.stringify({messages: sent, stream: true, max_tokens: Number($("max-tokens").value)}),
    });
    if (!response.ok) throw new Error(await problemOf(response));
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices?.[0]?.delta ?? {};
      text += delta.content ?? "";
      add(answer, content, delta);
    }
    messages.push({role: "assistant", content: text});
  } catch (error) {
    if (text) messages.push({role: "assistant", content: text});
    else messages.pop();
    if (error.name !== "AbortError") say("error", String(error.message ?? error)).setAttribute("role", "alert");
  } finally {
    content.end();
    chat.call = null;
    setAsking(false);
  }
}

async function problemOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answers with status ${response.status}`;
  }
}

function add(answer, content, delta) {
  const log = $("messages"), isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  if (delta.reasoning_content) answer.append(element("span", {class: "thought"}, delta.reasoning_content));
  if (delta.content) content.write(delta.content);
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function setAsking(isAsking) {
  $("send").disabled = isAsking;
  $("stop").disabled = !isAsking;
  if (!isAsking) $("question").focus({preventScroll: true});
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || chat.call) return;
  $("question").value = "";
  ask(question);
});
$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("form").requestSubmit();
});
$("stop").addEventListener("click", () => chat.call?.abort());
$("new-chat").addEventListener("click", () => {
  chat.call?.abort();
  chat.messages = [];
  $("messages").replaceChildren();
  $("question").focus();
});

// ---- the API key ----

function askForKey(problem) {
  $("key-problem").textContent = problem;
  $("key").value = "";
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

$("key-button").addEventListener("click", () => askForKey(""));
$("key-cancel").addEventListener("click", () => $("key-dialog").close());
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = $("key").value.trim();
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  $("key-dialog").close();
  location.reload();
});

poll();
