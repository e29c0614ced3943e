// The page of a router: chat, workers, requests. Plain JavaScript; all it knows comes from /events and the chat API.
"use strict";

const $ = (id) => document.getElementById(id);
const element = (name, attributes = {}, ...children) => {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
};
const drawn = (name, attributes) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
};
const millis = (value) => value == null ? "–" : value < 10 ? `${value.toFixed(2)} ms` : value < 10000 ? `${value.toFixed(0)} ms` : `${(value / 1000).toFixed(1)} s`;
const bytes = (value) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${value.toFixed(value < 10 && unit > 0 ? 1 : 0)} ${units[unit]}`;
};
const count = (number, noun) => `${number.toLocaleString()} ${noun}${number === 1 ? "" : "s"}`;
const pause = (time) => new Promise((resume) => setTimeout(resume, time));

// ---------------------------------------------------------------------------------------------------------------
// Calls

let askingKey = null;

// What is typed into the dialog for keys, which says why the last one was refused.
const typedKey = (refusal) => new Promise((resolve) => {
  $("key-refused").textContent = refusal;
  $("key-refused").hidden = !refusal;
  $("ask-key").addEventListener("close", () => {
    const key = $("key").value.trim();
    $("key").value = "";
    resolve(key);
  }, { once: true });
  $("ask-key").showModal();
});

// Asks for the key, once at a time. It is kept for this tab.
const askKey = (refusal) => askingKey ??= (async () => {
  let key = await typedKey(refusal);
  // A header takes no other characters: `fetch` would throw, whatever the server says.
  while (key && !/^[\x21-\x7e]+$/.test(key)) {
    key = await typedKey("A key has only ASCII letters, digits and signs, and no spaces.");
  }
  sessionStorage.setItem("key", key);
  askingKey = null;
})();

// `fetch` with the key; asks for one where the server wants it. Each try has a signal of its own.
const call = async (path, options = {}, signalOf = () => options.signal) => {
  for (;;) {
    const key = sessionStorage.getItem("key");
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const answer = await fetch(path, { ...options, headers, signal: signalOf() });
    if (answer.status !== 401) return answer;
    // Another call may have got a key meanwhile.
    if (key === sessionStorage.getItem("key")) await askKey(key ? "The server does not know this key." : "");
  }
};

// The server-sent events of an answer, as {name, data}.
const eventsOf = async function* (answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      let name = "message";
      const data = [];
      for (const line of part.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) data.push(line.slice(6));
      }
      if (data.length) yield { name, data: data.join("\n") };
    }
  }
};

// ---------------------------------------------------------------------------------------------------------------
// Workers

// How long a worker that left is shown, and that one has started again.
const SHOWN_FOR = 60000;
const workers = new Map(); // id to {now, node, moved, goneAt, againAt}
let model = null;

const showStatus = (text, kind) => {
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").className = kind;
};

const secondsSince = (at) => `${Math.round((Date.now() - at) / 1000)} s ago`;

const showWorker = (known) => {
  const { now, node, goneAt, againAt } = known;
  const state = goneAt ? "gone" : now.state;
  const again = !goneAt && againAt && Date.now() - againAt < SHOWN_FOR ? `; started again ${secondsSince(againAt)}` : "";
  node.className = `worker ${state}${again ? " again" : ""}`;
  const total = now.num_total_blocks ?? 0;
  const used = total - (now.num_free_blocks ?? total);
  const facts = goneAt
    ? `left ${secondsSince(goneAt)}`
    : `${state.replace("_", " ")}; ${now.num_running ?? 0} running, ${now.num_waiting ?? 0} waiting${again}`;
  const queued = !goneAt && now.num_queued_tokens ? `, ${count(now.num_queued_tokens, "token")} queued` : "";
  const meter = element("meter", { min: 0, max: Math.max(total, 1), value: used, "aria-label": `KV blocks in use at ${now.id}` });
  node.replaceChildren(element("b", {}, now.id), element("br"), facts + queued, meter, `KV ${used} of ${count(total, "block")}`);
};

const showCluster = (cluster) => {
  model = cluster.model;
  $("model").textContent = model ?? "loading the model";
  showStatus(cluster.missing ?? "ready", cluster.missing ? "bad" : "good");
  const seen = new Set();
  for (const now of cluster.workers) {
    seen.add(now.id);
    const known = workers.get(now.id) ?? { now, node: element("li"), moved: {} };
    // A worker may be back before the next look.
    if (known.now.incarnation !== now.incarnation) Object.assign(known, { againAt: Date.now(), moved: {} });
    Object.assign(known, { now, goneAt: null });
    workers.set(now.id, known);
    const list = $(now.role === "prefill" ? "prefill" : "decode");
    if (known.node.parentNode !== list) list.append(known.node);
  }
  for (const [id, known] of workers) {
    if (!seen.has(id)) known.goneAt ??= Date.now();
    if (known.goneAt && Date.now() - known.goneAt > SHOWN_FOR) {
      known.node.remove();
      workers.delete(id);
    } else {
      showWorker(known);
    }
  }
  // Halves of what the workers count: each byte is counted where it is sent and where it is received. What a worker moved
  // is kept while its report is missing.
  const at = performance.now();
  const totals = {}; // transport to bytes per second, and bytes
  for (const { id, handoff_bytes } of cluster.workers) {
    const { moved } = workers.get(id);
    for (const [transport, sum] of Object.entries(handoff_bytes)) {
      const before = moved[transport];
      moved[transport] = { at, sum, rate: before ? Math.max(0, (sum - before.sum) / ((at - before.at) / 1000)) : 0 };
    }
    for (const [transport, { at: seen, sum, rate }] of Object.entries(moved)) {
      if (!sum) continue;
      totals[transport] ??= { rate: 0, sum: 0 };
      totals[transport].rate += seen === at ? rate / 2 : 0;
      totals[transport].sum += sum / 2;
    }
  }
  const rates = Object.entries(totals).map(([transport, { rate, sum }]) => `${transport} ${bytes(rate)}/s, ${bytes(sum)} in all`);
  const handoffs = rates.length ? `; handoffs: ${rates.join("; ")}` : "";
  $("totals").textContent = `${count(cluster.workers.length, "worker")}, ${count(cluster.num_running, "request")} running here${handoffs}`;
};

// A dot from the worker that computed the prompt to the one that decodes.
const fly = (from, to) => {
  const [a, b] = [workers.get(from)?.node, workers.get(to)?.node];
  if (!a || !b || from === to || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const frame = $("flights").getBoundingClientRect();
  const middle = (node) => { const box = node.getBoundingClientRect(); return box.top + box.height / 2 - frame.top; };
  const ends = { x1: 0, y1: middle(a), x2: frame.width, y2: middle(b) };
  const line = drawn("line", ends);
  const dot = drawn("circle", { r: 5 });
  $("flights").append(line, dot);
  const path = [`translate(${ends.x1}px, ${ends.y1}px)`, `translate(${ends.x2}px, ${ends.y2}px)`];
  dot.animate({ transform: path }, { duration: 700, easing: "ease-in-out" }).finished.then(() => { line.remove(); dot.remove(); });
};

// ---------------------------------------------------------------------------------------------------------------
// Requests

const MAX_SHOWN = 200;
const plans = new Map(); // request id to the plans that the chat was told
const ended = [];

const PARTS = [
  ["before", "Before the worker: tokenising, planning, network"],
  ["queue", "Queue"],
  ["prefill", "Prefill"],
  ["transfer", "Transfer that is not hidden"],
  ["decode", "Decode"],
];

// Milliseconds of each part; what is unknown is 0.
const partsOf = (request) => {
  const { queue_ms: queue = 0, prefill_ms: prefill = 0, exposed_ms: transfer = 0, ttft_ms: ttft = 0, e2e_ms: all = 0 } = request;
  const before = Math.max(0, (ttft ?? 0) - (queue ?? 0) - (prefill ?? 0));
  const decode = Math.max(0, all - (ttft ?? all) - (transfer ?? 0));
  return [before, queue ?? 0, prefill ?? 0, transfer ?? 0, decode];
};

const showDetail = (request) => {
  const parts = partsOf(request);
  const all = parts.reduce((a, b) => a + b, 0) || 1;
  const bar = element("div", { class: "timeline", "aria-hidden": "true" });
  const rows = PARTS.map(([kind, name], at) => {
    if (parts[at] > 0) {
      const piece = element("i", { class: kind });
      piece.style.flex = `${parts[at] / all} 0 auto`;
      bar.append(piece);
    }
    return element("tr", {}, element("td", {}, element("span", { class: `key ${kind}` }), name), element("td", {}, millis(parts[at])));
  });
  const body = [bar, element("table", {}, element("tbody", {}, ...rows))];
  const facts = [
    `${request.outcome}; ${count(request.prompt_tokens, "prompt token")} (${request.cached_tokens} cached), ${count(request.completion_tokens, "output token")}`,
    request.drafted_tokens ? `${request.accepted_tokens} of ${request.drafted_tokens} drafted tokens accepted` : "",
    request.trace_id ? `trace ${request.trace_id}` : "",
  ];
  body.push(element("p", {}, facts.filter(Boolean).join("; ")));
  for (const plan of plans.get(request.id) ?? []) {
    const chosen = (option) => ["decode", "prefill", "prefix_source"].every((key) => option[key] === plan.chosen[key]);
    const head = ["Prefill", "Decode", "Prefix from", "TTFT", "TPOT", "Harm to others"].map((name) => element("th", { scope: "col" }, name));
    const options = (plan.options.length ? plan.options : [plan.chosen]).map((option) => {
      const cells = [option.prefill ?? "on the decode worker", option.decode, option.prefix_source ?? "–",
        millis(option.ttft_ms), millis(option.tpot_ms), millis(option.harm_ms)];
      return element("tr", chosen(option) ? { class: "chosen" } : {}, ...cells.map((cell) => element("td", {}, cell)));
    });
    body.push(element("h3", {}, `Plan ${plan.attempt + 1}: the chosen one is bold`),
      element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Candidates of the plan" },
        element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...options))));
  }
  $("detail-title").textContent = `Request ${request.id}`;
  $("detail-body").replaceChildren(...body);
  $("detail").showModal();
};

const rowOf = (request) => {
  const open = element("button", { type: "button", class: "link", onclick: () => showDetail(request) }, request.id.slice(0, 13));
  const way = request.decode_worker == null ? "–"
    : request.prefill_worker === request.decode_worker ? request.decode_worker
    : `${request.prefill_worker} → ${request.decode_worker}`;
  const tokens = `${request.prompt_tokens} → ${request.completion_tokens}`;
  const cells = [request.outcome, tokens, millis(request.ttft_ms), millis(request.tpot_ms), way];
  return element("tr", {}, element("td", {}, open), ...cells.map((cell) => element("td", {}, cell)));
};

const percentile = (sorted, share) => sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))];

const showLatency = () => {
  const times = ended.map((request) => request.ttft_ms).filter((time) => time != null);
  if (!times.length) return;
  const sorted = [...times].sort((a, b) => a - b);
  $("latency-text").textContent = `TTFT of the last ${count(times.length, "request")}: p50 ${millis(percentile(sorted, 0.5))}, `
    + `p99 ${millis(percentile(sorted, 0.99))}; the chart goes up to ${millis(sorted.at(-1))}`;
  const dots = times.map((time, at) => drawn("circle", {
    cx: 600 - (at + 0.5) * 600 / MAX_SHOWN, cy: 115 - 105 * time / (sorted.at(-1) || 1), r: 2.5,
  }));
  $("latency-chart").replaceChildren(...dots);
};

const showEnded = (request) => {
  ended.unshift(request);
  ended.splice(MAX_SHOWN);
  $("ended").prepend(rowOf(request));
  while ($("ended").children.length > MAX_SHOWN) $("ended").lastChild.remove();
  showLatency();
  fly(request.prefill_worker, request.decode_worker);
};

// A router sends a picture of its workers every half second.
const SILENCE = 5000;

// Follows /events for as long as the page is open.
const watch = async () => {
  for (;;) {
    let timer = null;
    let silent = null;
    const wait = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silent.abort(new Error(`nothing for ${SILENCE / 1000} s`)), SILENCE);
    };
    const begin = () => {
      silent = new AbortController();
      wait();
      return silent.signal;
    };
    try {
      const answer = await call("/events", {}, begin);
      if (!answer.ok) throw new Error((await answer.text()) || answer.status);
      for await (const { name, data } of eventsOf(answer)) {
        wait();
        if (name === "cluster") showCluster(JSON.parse(data));
        else if (name === "request") showEnded(JSON.parse(data));
      }
    } catch (error) {
      console.info("no events:", error);
    }
    clearTimeout(timer);
    showStatus("the router does not answer", "bad");
    await pause(1000);
  }
};

// ---------------------------------------------------------------------------------------------------------------
// Chat

let messages = [];
let running = null; // the controller of the request that runs

const scrollToEnd = () => { $("messages").scrollTop = $("messages").scrollHeight; };

// Changes the messages, and follows their end unless the reader has scrolled away from it.
const following = (change) => {
  const list = $("messages");
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  change();
  if (isAtEnd) scrollToEnd();
};

const bubble = (kind, text = "") => {
  const words = document.createTextNode(text);
  const node = element("div", { class: `message ${kind}` }, words);
  following(() => $("messages").append(node));
  return { node, words };
};

// Shows what the model thinks before it answers. It is open until the answer begins.
const thinking = (reply) => {
  const words = document.createTextNode("");
  const node = element("details", { class: "thought", open: "" }, element("summary", {}, "Thoughts"), words);
  reply.node.prepend(node);
  return { node, words };
};

// What a field of numbers says; an empty one says nothing.
const numberIn = (id) => $(id).value === "" ? undefined : Number($(id).value);

const factsOf = (timing, usage) => {
  const way = timing.prefill_worker === timing.decode_worker
    ? `computed on ${timing.decode_worker}` : `prefilled on ${timing.prefill_worker}, decoded on ${timing.decode_worker}`;
  // Tokens that came at once have no rate.
  const rate = timing.tpot_ms * (usage.completion_tokens - 1) >= 5 ? `, ${(1000 / timing.tpot_ms).toFixed(0)} tokens/s` : "";
  return `TTFT ${millis(timing.ttft_ms)}${rate}, ${count(usage.completion_tokens, "token")}, ${way}`;
};

const ask = async (prompt) => {
  const mine = messages; // "New chat" begins another list.
  mine.push({ role: "user", content: prompt });
  const question = bubble("user", prompt);
  scrollToEnd();
  const reply = bubble("assistant");
  running = new AbortController();
  $("send").textContent = "Stop";
  let text = "";
  let thought = null;
  let isCutOff = false;
  try {
    const body = {
      model, messages: mine, stream: true, stream_options: { include_usage: true }, include_timing: true, explain: true,
      max_tokens: numberIn("max-tokens"), temperature: numberIn("temperature"),
    };
    const headers = { "Content-Type": "application/json" };
    const answer = await call("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal: running.signal });
    if (!answer.ok) throw new Error((await answer.json()).error?.message ?? `HTTP ${answer.status}`);
    for await (const { data } of eventsOf(answer)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.plans) {
        plans.set(chunk.id, chunk.plans);
        if (plans.size > MAX_SHOWN) plans.delete(plans.keys().next().value);
      }
      following(() => {
        const { delta, finish_reason } = chunk.choices[0] ?? {};
        if (delta?.reasoning_content) {
          thought ??= thinking(reply);
          thought.words.data += delta.reasoning_content;
        }
        if (delta?.content) {
          if (thought && !text) thought.node.open = false;
          text += delta.content;
          reply.words.data = text;
        }
        isCutOff ||= finish_reason === "length";
        if (isCutOff && chunk.usage) {
          const at = `Cut off at ${count(chunk.usage.completion_tokens, "token")}`;
          reply.node.append(element("p", { class: "cut" }, at));
        }
        if (chunk.timing?.length && chunk.usage) {
          const show = () => {
            const request = ended.find((request) => request.id === chunk.id);
            if (request) showDetail(request);
          };
          reply.node.append(element("button", { type: "button", class: "facts link", onclick: show }, factsOf(chunk.timing[0], chunk.usage)));
        }
      });
    }
    mine.push({ role: "assistant", content: text });
  } catch (error) {
    const isStopped = error.name === "AbortError";
    if (isStopped && text) mine.push({ role: "assistant", content: text });
    else mine.pop();
    if (!text) reply.node.remove();
    if (mine === messages && !isStopped) bubble("error", error.message);
    if (mine === messages && isStopped && !text) {
      // As if it had not been sent.
      question.node.remove();
      $("prompt").value ||= prompt;
    }
  }
  running = null;
  $("send").textContent = "Send";
};

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const prompt = $("prompt").value.trim();
  if (!prompt) return;
  $("prompt").value = "";
  ask(prompt);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) $("ask").requestSubmit();
  }
});
$("new-chat").addEventListener("click", () => {
  running?.abort();
  messages = [];
  $("messages").replaceChildren();
  $("prompt").focus();
});
watch();
