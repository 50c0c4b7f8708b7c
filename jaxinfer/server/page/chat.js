// The chat: one turn is a question and its answer. All text goes into text nodes, never into markup.

import { ServerError, streamChat } from "./api.js";
import { duration, number, plural } from "./format.js";
import { invalidField, sampling, systemPrompt } from "./settings.js";

const log = document.getElementById("log");
const empty = document.getElementById("empty");
const message = document.getElementById("message");
const state = document.getElementById("state");
const buttons = {
  send: document.getElementById("send"),
  stop: document.getElementById("stop-button"),
  retry: document.getElementById("retry"),
  clear: document.getElementById("clear"),
};
const ENDS = {
  stop: "complete",
  length: "at max tokens",
  abort: "stopped",
  timeout: "timed out",
  error: "failed",
};

let turns = []; // {question, said, answer: Text, node, figures, answerNode}; said is what came, answer what is seen
let running = null; // the AbortController of the answer that is coming
let showView = () => {};

function element(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function addTurn(question) {
  const answer = document.createTextNode("");
  const figures = element("dl", "figures");
  const answerNode = element("div", "answer", element("div", "text", answer), figures);
  answerNode.setAttribute("role", "group");
  answerNode.setAttribute("aria-label", "Answer");
  answerNode.setAttribute("aria-live", "polite");
  answerNode.setAttribute("aria-busy", "true"); // read out when it is whole, not token by token
  const asked = element("div", "question", element("div", "text", question));
  asked.setAttribute("role", "group");
  asked.setAttribute("aria-label", "You");
  const turn = { question, said: "", answer, figures, answerNode, node: element("div", "turn", asked, answerNode) };
  turns.push(turn);
  log.append(turn.node);
  return turn;
}

/** The conversation as the server takes it; turns without an answer are left out. */
function messagesFor(turn) {
  const system = systemPrompt();
  const told = turns
    .filter((one) => one !== turn && one.said)
    .flatMap((one) => [
      { role: "user", content: one.question },
      { role: "assistant", content: one.said },
    ]);
  const first = system ? [{ role: "system", content: system }] : [];
  return [...first, ...told, { role: "user", content: turn.question }];
}

async function ask(question) {
  const turn = addTurn(question);
  const controller = new AbortController();
  running = controller;
  refresh("Waiting for the first token");
  log.scrollTop = log.scrollHeight;
  const times = { start: performance.now(), first: null, last: null, chunks: 0 };
  const told = { usage: null, reason: null };
  let failure = null;
  try {
    // Running counts, so that a stopped answer has them too.
    const stream_options = { include_usage: true, continuous_usage_stats: true };
    const body = { ...sampling(), messages: messagesFor(turn), stream: true, stream_options };
    for await (const chunk of streamChat(body, controller.signal)) {
      takeIn(turn, chunk, times, told);
    }
  } catch (error) {
    if (controller.signal.aborted) told.reason = "abort";
    else failure = error;
  }
  finish(turn, times, told, failure);
}

function takeIn(turn, chunk, times, told) {
  told.usage = chunk.usage ?? told.usage;
  const choice = chunk.choices?.[0];
  told.reason = choice?.finish_reason ?? told.reason;
  const text = choice?.delta?.content;
  if (!text) return;
  const follow = atEnd();
  turn.said += text;
  turn.answer.appendData(text);
  if (follow) log.scrollTop = log.scrollHeight;
  times.last = performance.now();
  if (times.first === null) {
    times.first = times.last;
    refresh("Answering");
  }
  times.chunks += 1;
}

/** Whether the newest text is in sight; who reads further up is left there. */
function atEnd() {
  return log.scrollHeight - log.scrollTop - log.clientHeight < 40;
}

function finish(turn, times, told, failure) {
  running = null;
  const follow = atEnd();
  if (failure) {
    const words = failure instanceof ServerError ? failure.message : `The page failed: ${failure.message}`;
    turn.answerNode.append(element("p", "error", words));
  }
  turn.answer.data = turn.answer.data.trimEnd();
  showFigures(turn.figures, times, told, failure);
  turn.answerNode.setAttribute("aria-busy", "false");
  refresh(failure ? "No answer" : told.reason === "abort" ? "Stopped" : "Done");
  if (follow) log.scrollTop = log.scrollHeight;
}

/** TTFT from the sending to the first text; ITL from there to the last text, a token. */
function showFigures(list, times, told, failure) {
  const tokens = told.usage?.completion_tokens ?? times.chunks;
  const add = (name, value, title) => {
    const pair = element("div", "", element("dt", "", name), element("dd", "", value));
    pair.title = title;
    list.append(pair);
  };
  if (times.first !== null) {
    add("TTFT", duration((times.first - times.start) / 1000), "Time to first token, as this browser saw it");
    const span = (times.last - times.first) / 1000;
    if (tokens > 1 && span > 0) {
      add("ITL", duration(span / (tokens - 1)), "Inter-token latency: the mean, after the first token");
      add("speed", `${number((tokens - 1) / span)} tokens/s`, "Tokens a second, after the first token");
    }
  }
  if (told.usage) {
    const cached = told.usage.prompt_tokens_details?.cached_tokens ?? 0;
    add("out", plural(tokens, "token"), "Generated tokens");
    const title = "Prompt tokens, and those of them whose KV came from the prefix cache";
    add("prompt", `${plural(told.usage.prompt_tokens, "token")}, ${number(cached)} cached`, title);
  } else if (times.chunks) {
    add("out", `about ${plural(times.chunks, "token")}`, "Pieces of text that came; the count came not");
  }
  if (told.reason && !failure) add("finish", ENDS[told.reason] ?? told.reason, "Why the answer ended");
}

function refresh(words) {
  state.textContent = words;
  buttons.send.disabled = running !== null;
  buttons.stop.disabled = running === null;
  buttons.retry.disabled = running !== null || turns.length === 0;
  buttons.clear.disabled = turns.length === 0;
  empty.hidden = turns.length > 0;
}

function stop() {
  running?.abort();
}

function send() {
  const text = message.value;
  if (running || !text.trim() || refuseSettings()) return;
  message.value = "";
  grow();
  ask(text);
}

/** Makes the field as tall as its text, where the style sheet cannot. */
function grow() {
  if (CSS.supports("field-sizing", "content")) return;
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight + 2}px`;
}

/** Shows the first setting that cannot be sent. */
function refuseSettings() {
  const field = invalidField();
  if (!field) return false;
  showView("settings");
  field.focus();
  state.textContent = `${field.labels[0].firstChild.data.trim()}: ${field.validationMessage}`;
  return true;
}

function retry() {
  if (running || !turns.length || refuseSettings()) return;
  const turn = turns.pop();
  turn.node.remove();
  ask(turn.question);
  message.focus();
}

function clear() {
  stop();
  for (const turn of turns) turn.node.remove();
  turns = [];
  refresh("");
  message.focus();
}

/** Follows the composer and the keys; `show` brings a view to the front. */
export function startChat(show) {
  showView = show;
  document.getElementById("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  message.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  message.addEventListener("input", grow);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) stop();
  });
  buttons.stop.addEventListener("click", () => {
    stop();
    message.focus();
  });
  buttons.retry.addEventListener("click", retry);
  buttons.clear.addEventListener("click", clear);
  refresh("");
}
