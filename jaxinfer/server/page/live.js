// The live view: asks for a snapshot twice a second, and only while it can be seen.

import { getJson } from "./api.js";
import { drawBars, drawLines, drawPool, drawSwatch } from "./charts.js";
import { duration, number, percent, plural, quantile, since, total } from "./format.js";

const PERIOD = 500; // ms
const PATIENCE = 3000; // ms to the next try when the server does not answer
const SPANS = [30, 60, 120]; // seconds of the charts over time: the shortest that shows all there is
const SPAN = SPANS[SPANS.length - 1];
const $ = (id) => document.getElementById(id);
const view = $("live");

let history = []; // snapshots of the last SPAN seconds, oldest first
let timer = null;
let asking = false;
let windowName = "all";

function isSeen() {
  return document.visibilityState === "visible" && view.offsetParent !== null;
}

async function poll() {
  timer = null;
  if (asking || !isSeen()) return;
  asking = true;
  let snapshot = null;
  try {
    snapshot = await getJson("live", AbortSignal.timeout(20 * PERIOD));
    tell("live", false);
  } catch (error) {
    tell(error.status ? error.message : "no contact with the server", true);
  }
  asking = false;
  timer = setTimeout(poll, snapshot ? PERIOD : PATIENCE);
  if (snapshot) takeIn(snapshot); // last: an error in the pictures shows in the console, and the next try goes on
}

/** Asks at once if nothing is asked or planned: what was hidden may be seen now. */
function wake() {
  if (timer !== null) clearTimeout(timer);
  if (isSeen()) poll();
}

function tell(words, lost) {
  if ($("contact").textContent !== words) $("contact").textContent = words;
  $("contact").classList.toggle("lost", lost);
}

function takeIn(snapshot) {
  const before = history[history.length - 1];
  if (before && (snapshot.time < before.time || snapshot.output_tokens < before.output_tokens)) {
    history = []; // the server began anew
  }
  history.push(rated(snapshot, history[history.length - 1]));
  history = history.filter((one) => one.time >= snapshot.time - SPAN - 1);
  draw();
}

/** A snapshot with the rate of tokens since the one before it. */
function rated(now, then) {
  const seconds = then ? now.time - then.time : 0;
  const rate = (name) => (seconds > 0 ? (now[name] - then[name]) / seconds : null);
  return { ...now, rate: rate("output_tokens"), promptRate: rate("prompt_tokens") };
}

function draw() {
  const now = history[history.length - 1];
  if (!now || !isSeen()) return;
  showTiles(now);
  showPool(now);
  const known = history.filter((one) => one.rate !== null);
  const top = Math.max(0, ...known.map((one) => one.rate));
  const span = SPANS.find((seconds) => seconds >= now.time - history[0].time) ?? SPAN;
  $("span").textContent = `last ${span} s`;
  drawLines($("rate-chart"), known, ["rate"], span);
  name("rate-chart", `Generated tokens a second over time: ${number(now.rate)} now, ${number(top)} at most`);
  drawLines($("rows-chart"), history, ["running", "waiting"], span);
  name("rows-chart", `Rows over time: ${number(now.running)} running and ${number(now.waiting)} waiting now`);
  showLatency("ttft", now);
  showLatency("itl", now);
  $("totals").textContent =
    `Since start: ${plural(now.prompt_tokens, "prompt token")}, ${plural(now.output_tokens, "generated token")}, ` +
    `${plural(now.steps, "step")}; ${ended(now.finished)}.`;
}

function ended(finished) {
  const parts = Object.entries(finished).filter(([, count]) => count);
  return parts.length ? `ended by ${parts.map(([reason, count]) => `${reason} ${number(count)}`).join(", ")}` : "none ended";
}

function name(id, words) {
  $(id).setAttribute("aria-label", words);
}

function showTiles(now) {
  const texts = {
    running: number(now.running),
    "running-sub": `of ${plural(now.max_running, "row")}`,
    waiting: number(now.waiting),
    "waiting-sub": now.max_waiting === null ? "no limit" : `of ${number(now.max_waiting)}`,
    rate: number(now.rate),
    "rate-sub": `prompts ${number(now.promptRate)}`,
    hits: percent(now.prefix_hits, now.prefix_queries),
    "hits-sub": `${compact(now.prefix_hits)} of ${compact(now.prefix_queries)}`,
    preemptions: number(Object.values(now.preemptions).reduce((sum, count) => sum + count, 0)),
    "preemptions-sub": preempted(now.preemptions),
    compilations: number(now.compilations),
    "compilations-sub": now.compilations ? "after warm-up!" : "after warm-up",
  };
  for (const [id, text] of Object.entries(texts)) $(id).textContent = text;
  $("compilations-tile").classList.toggle("alarm", now.compilations > 0);
}

function compact(count) {
  return count.toLocaleString("en-US", { notation: "compact" });
}

function preempted(preemptions) {
  const parts = Object.entries(preemptions).filter(([, count]) => count);
  return parts.map(([mode, count]) => `${number(count)} ${mode}`).join(", ") || "none";
}

function showPool({ pages, host_pages: host }) {
  const [free, used, shared, cached] = pages.counts;
  drawPool($("pool"), pages.cells);
  pages.counts.forEach((count, state) => {
    $(`pages-${state}`).textContent = number(count);
  });
  const merged = pages.per_cell > 1 ? `; a cell is ${pages.per_cell} pages, the commonest state` : "";
  const away = host.total ? `; ${number(host.used)} of ${number(host.total)} in host memory` : "";
  $("pool-note").textContent = `${plural(pages.total, "page")} of ${plural(pages.size, "token")}${merged}${away}`;
  name("pool", `${plural(pages.total, "page")}: ${used} in use, ${shared} shared, ${cached} cached, ${free} free`);
}

function showLatency(which, now) {
  let shown = now[which];
  if (windowName === "minute") {
    const old = history.find((one) => one.time >= now.time - 60);
    shown = since(shown, old === now ? null : old[which]);
  }
  const count = total(shown);
  const parts = [0.5, 0.9, 0.99].map((share) => `p${share * 100} ${quantile(shown, share)}`);
  $(`${which}-note`).textContent = count ? parts.join(" · ") : "nothing measured";
  drawBars($(`${which}-chart`), shown, duration);
  name(`${which}-chart`, `${which.toUpperCase()} of ${plural(count, "value")}: ${parts.join(", ")}`);
}

/** Draws everything again, for another theme or size. */
export function redraw() {
  for (const swatch of document.querySelectorAll("#legend canvas")) drawSwatch(swatch);
  draw();
}

/** Starts to look; `wake` is to be called whenever the view may have come into sight. */
export function startLive() {
  const choices = view.querySelectorAll("[data-window]");
  for (const button of choices) {
    button.addEventListener("click", () => {
      windowName = button.dataset.window;
      for (const one of choices) one.setAttribute("aria-pressed", String(one === button));
      draw();
    });
  }
  document.addEventListener("visibilitychange", wake);
  addEventListener("resize", () => {
    redraw();
    wake();
  });
  redraw();
  wake();
  return () => {
    redraw();
    wake();
  };
}
