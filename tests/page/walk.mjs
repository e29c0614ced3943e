// A newcomer's first ten minutes, in a real browser: start, page, chat, a request's timeline, a worker killed, the page as it heals;
// answers that a test gives in the router's place; and the page of a server that wants a key.
// Fails on an error in the console, on a finding of axe, and if the page does not show what happened. By hand; CI runs nothing of it.
//
//     apt-get install chromium && npm ci --prefix tests/page
//     node tests/page/walk.mjs target/release/baton [FOLDER FOR SCREENSHOTS]

import assert from "node:assert/strict";
import { spawn, spawnSync } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import puppeteer from "puppeteer-core";

const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const [baton = "target/release/baton", folder] = process.argv.slice(2);
if (folder) mkdirSync(folder, { recursive: true });
const browserPath = process.env.CHROMIUM ?? "/usr/bin/chromium";
const errors = [];

const step = (text) => console.log(`${new Date().toISOString().slice(11, 19)} ${text}`);

/** `baton up` on a free port, with two decode workers; its URL. */
const start = async (...options) => {
  const up = spawn(baton, ["up", "--port", "0", "--prefill", "1", "--decode", "2", "--log-color", "never", ...options]);
  let log = "";
  for (const stream of [up.stdout, up.stderr]) stream.on("data", (data) => { log += data; });
  const url = await until(() => log.match(/Baton is ready: (\S+)/)?.[1], "an address in the log of up");
  await until(async () => (await fetch(`${url}/readyz`).catch(() => null))?.ok, "readiness");
  return { up, url };
};

/** Waits until `what` gives something true, for at most 30 s. */
const until = async (what, name) => {
  for (const end = Date.now() + 30_000; Date.now() < end; await new Promise((done) => setTimeout(done, 100))) {
    const value = await what();
    if (value) return value;
  }
  throw new Error(`waited for ${name}`);
};

/** The process of a worker that `up` has started. */
const processOf = (up, worker) => readdirSync("/proc").filter((name) => /^\d+$/.test(name)).find((pid) => {
  try {
    const [, parent] = readFileSync(`/proc/${pid}/stat`, "utf8").match(/\) \S (\d+)/);
    return Number(parent) === up.pid && readFileSync(`/proc/${pid}/cmdline`, "utf8").includes(`\0--id\0${worker}\0`);
  } catch {
    return false;
  }
});

const check = async (page, name) => {
  // The page's policy forbids foreign scripts; this one comes through the debugger.
  await page.evaluate(AXE);
  const { violations } = await page.evaluate(() => globalThis.axe.run());
  for (const { id, help, nodes } of violations) errors.push(`axe, ${name}: ${id}: ${help}: ${nodes.map((node) => node.html).join(" ")}`);
  if (folder) await page.screenshot({ path: `${folder}/page-${name}.png` });
  step(`${name}: ${violations.length} findings of axe`);
};

const text = (page, selector) => page.$eval(selector, (node) => node.textContent);

const walk = async (page, { up, url }) => {
  await page.goto(url);
  await until(async () => (await text(page, "#status")) === "ready", "the status ready");
  await until(async () => (await page.$$("#workers .worker")).length === 3, "three workers");
  await check(page, "start");

  // By keyboard alone.
  await page.focus("#prompt");
  const question = "The old house keeps a red key. The garden keeps a blue lamp. What does the old house keep? ".repeat(3);
  await page.keyboard.type(question);
  await page.keyboard.press("Enter");
  await page.waitForSelector(".message.assistant .facts");
  const facts = await text(page, ".message.assistant .facts");
  assert.match(facts, /TTFT .* ms.*(prefilled on prefill-0, decoded on decode-\d|computed on decode-\d)/);
  step(`chat: ${facts}`);
  await check(page, "chat");

  await page.focus(".message.assistant .facts");
  await page.keyboard.press("Enter");
  await page.waitForSelector("#detail[open] .timeline i");
  assert.match(await text(page, "#detail-body"), /Plan 1/);
  await check(page, "timeline");
  await page.keyboard.press("Escape");

  // `up` may start it again before the page looks.
  process.kill(Number(processOf(up, "decode-0")), "SIGKILL");
  const killed = ".worker.gone, .worker.again";
  await page.waitForSelector(killed);
  step(`killed: ${await text(page, killed)}`);
  await check(page, "killed");
  await until(async () => (await page.$$(".worker.ready")).length === 3, "the worker's return");
  assert.match(await text(page, ".worker.again"), /started again \d+ s ago/);
  step("healed: three workers are ready");

  await page.click("#new-chat");
  await page.focus("#prompt");
  await page.keyboard.type("Hello");
  await page.keyboard.press("Enter");
  await page.waitForSelector(".message.assistant .facts");
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "dark" }]);
  await check(page, "dark");
  await page.setViewport({ width: 390, height: 844 });
  await check(page, "narrow");
};

/** What the test answers in the router's place: `asked` has the bodies of the calls, `say` sends a chunk, `end` ends the answer. */
const answerHere = (page) => page.evaluate(() => {
  const { fetch } = globalThis;
  const here = { asked: [] };
  globalThis.here = here;
  globalThis.fetch = async (path, options) => {
    if (path !== "/v1/chat/completions") return fetch(path, options);
    here.asked.push(JSON.parse(options.body));
    const encoder = new TextEncoder();
    return new Response(new ReadableStream({
      start(answer) {
        const send = (data) => answer.enqueue(encoder.encode(`data: ${data}\n\n`));
        here.say = (chunk) => send(JSON.stringify({ id: "here", choices: [], ...chunk }));
        here.end = () => { send("[DONE]"); answer.close(); };
        options.signal.addEventListener("abort", () => answer.error(options.signal.reason));
      },
    }));
  };
});

const say = (page, delta, finish_reason = null) =>
  page.evaluate((choice) => globalThis.here.say({ choices: [choice] }), { delta, finish_reason });

const asked = (page) => page.evaluate(() => globalThis.here.asked.at(-1));

/** Sends a message and waits until the page has asked for its answer. */
const send = async (page, prompt) => {
  const number = await page.evaluate(() => globalThis.here.asked.length);
  await page.focus("#prompt");
  await page.keyboard.type(prompt);
  await page.keyboard.press("Enter");
  await until(() => page.evaluate((number) => globalThis.here.asked.length > number, number), "a request");
};

const isIdle = async (page) => (await text(page, "#send")) === "Send";

/** Answers that the embedded model does not give. */
const walkAnswers = async (page, { url }) => {
  await page.goto(url);
  await until(async () => (await text(page, "#status")) === "ready", "the status ready");
  await answerHere(page);

  // A new chat while an answer comes has nothing of the old one.
  await send(page, "First");
  await say(page, { content: "Old" });
  await until(async () => (await text(page, "#messages")) === "FirstOld", "the beginning of an answer");
  await page.click("#new-chat");
  await until(() => isIdle(page), "the end of the old answer");
  await send(page, "Second");
  assert.deepEqual((await asked(page)).messages, [{ role: "user", content: "Second" }]);
  assert.equal(await text(page, "#messages"), "Second");

  // A message without an answer is taken back, and one with the beginning of an answer stays.
  await page.click("#send");
  await until(() => isIdle(page), "the end of the second answer");
  assert.equal(await page.$eval("#prompt", (node) => node.value), "Second");
  await send(page, "!");
  assert.deepEqual((await asked(page)).messages, [{ role: "user", content: "Second!" }]);
  await say(page, { content: "Half" });
  await until(async () => (await text(page, "#messages")) === "Second!Half", "half of an answer");
  await page.click("#send");
  await until(() => isIdle(page), "the end of half of an answer");
  await send(page, "More");
  assert.deepEqual((await asked(page)).messages.map(({ content }) => content), ["Second!", "Half", "More"]);
  step("a stopped answer stays in its chat");

  // Thoughts are open until the answer begins; an answer that was cut off says so.
  await page.click("#new-chat");
  await until(() => isIdle(page), "the end of the last answer");
  await send(page, "Think");
  assert.equal((await asked(page)).max_tokens, 1024);
  await say(page, { reasoning_content: "Well, <b>so" });
  await page.waitForSelector(".thought[open]");
  assert.equal(await text(page, ".thought"), "ThoughtsWell, <b>so");
  await check(page, "thoughts");
  await say(page, { content: "A lo" });
  await page.waitForSelector(".thought:not([open])");
  await say(page, {}, "length");
  await page.evaluate(() => {
    globalThis.here.say({ usage: { completion_tokens: 7 } });
    globalThis.here.end();
  });
  await page.waitForSelector(".message .cut");
  assert.equal(await text(page, ".message .cut"), "Cut off at 7 tokens");
  await until(() => isIdle(page), "the end of a long answer");
  await page.$eval("#max-tokens", (node) => { node.value = ""; });
  await send(page, "On");
  const body = await asked(page);
  assert.equal(body.max_tokens, undefined);
  assert.deepEqual(body.messages.at(1), { role: "assistant", content: "A lo" });
  await page.click("#send");
  await until(() => isIdle(page), "the end of an answer without a limit");
  step("thoughts are shown, and that an answer was cut off");

  // The page follows an answer, but not away from what the reader has scrolled to. The field stays in view.
  const fromEnd = () => page.$eval("#messages", (list) => list.scrollHeight - list.scrollTop - list.clientHeight);
  const lines = "A line\n".repeat(100);
  const length = async () => (await text(page, "#messages")).length;
  const sayLines = async () => {
    const before = await length();
    await say(page, { content: lines });
    await until(async () => (await length()) === before + lines.length, "more lines");
  };
  for (const [width, height] of [[1280, 900], [390, 844]]) {
    await page.setViewport({ width, height });
    await send(page, "Long");
    await sayLines();
    assert.ok((await fromEnd()) < 2, "it follows");
    await page.$eval("#messages", (list) => { list.scrollTop = 0; });
    await sayLines();
    assert.equal(await page.$eval("#messages", (list) => list.scrollTop), 0, "it stays");
    await page.evaluate(() => globalThis.scrollTo(0, 0));
    assert.ok(await page.$eval("#prompt", (field) => field.getBoundingClientRect().bottom <= globalThis.innerHeight), "the field is in view");
    await page.evaluate(() => globalThis.here.end());
    await until(() => isIdle(page), "the end of a very long answer");
  }
  step("an answer is followed until the reader scrolls");
};

/** The page of a server that wants a key. */
const walkWithKey = async (page, { url }, key) => {
  await page.goto(url);
  const enter = async (key) => {
    await page.waitForSelector("#ask-key[open]");
    await page.type("#key", key);
    await page.keyboard.press("Enter");
  };
  await page.waitForSelector("#ask-key[open]");
  await check(page, "key");
  const refused = (reason) => until(async () => (await text(page, "#key-refused")).includes(reason), `the refusal: ${reason}`);
  await enter("baton_wrong–"); // A dash that no header takes.
  await refused("only ASCII");
  await enter("baton_wrong");
  await refused("does not know");
  await enter(` ${key} `);
  await until(async () => (await text(page, "#status")) === "ready", "the status ready");
  await page.focus("#prompt");
  await page.keyboard.type("Hello");
  await page.keyboard.press("Enter");
  await page.waitForSelector(".message.assistant .facts");
  step(`chat with a key: ${await text(page, ".message.assistant .facts")}`);
  await page.reload();
  await until(async () => (await text(page, "#status")) === "ready", "the status ready without asking again");
};

/** A file with one key, in a directory of its own, and the key. */
const newKey = () => {
  const { stdout, stderr } = spawnSync(baton, ["keys", "new", "walker", "--tenant", "walkers"], { encoding: "utf8" });
  const dir = mkdtempSync(`${tmpdir()}/baton-page-`);
  const file = `${dir}/keys.toml`;
  writeFileSync(file, stdout);
  return { dir, file, key: stderr.match(/baton_\w+/)[0] };
};

const browser = await puppeteer.launch({ executablePath: browserPath, args: ["--no-sandbox", "--disable-gpu"] });

/** Walks the page of a server of its own. */
const visit = async (options, walk) => {
  const server = await start(...options);
  step(`up at ${server.url}`);
  try {
    const page = await browser.newPage();
    await page.setViewport({ width: 1280, height: 900 });
    await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "light" }]);
    // Chromium says that a key is missing, as the page does.
    const isExpected = (text) => options.length > 0 && text.includes("401");
    page.on("console", (message) => {
      if (["error", "warn"].includes(message.type()) && !isExpected(message.text())) errors.push(`console: ${message.text()}`);
    });
    page.on("pageerror", (error) => errors.push(`page: ${error}`));
    page.on("requestfailed", (request) => errors.push(`request: ${request.url()}: ${request.failure()?.errorText}`));
    await walk(page, server);
    await page.close();
  } finally {
    server.up.kill("SIGTERM");
  }
};

try {
  await visit([], walk);
  await visit([], walkAnswers);
  const { dir, file, key } = newKey();
  try {
    await visit(["--api-keys", file], (page, server) => walkWithKey(page, server, key));
  } finally {
    rmSync(dir, { recursive: true });
  }
} finally {
  await browser.close();
}
for (const error of errors) console.error(error);
step(errors.length ? `${errors.length} errors` : "no error in the console, no finding of axe");
process.exitCode = errors.length ? 1 : 0;
