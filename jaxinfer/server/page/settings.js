// The settings form: the model, the key, and what goes into a request.

import { apiKey, getJson, keepApiKey } from "./api.js";

const form = document.getElementById("settings-form");
const model = document.getElementById("model");
const key = document.getElementById("api-key");
const note = document.getElementById("settings-note");

/** The first setting that its own field refuses, or null. */
export function invalidField() {
  return form.querySelector(":invalid:not(fieldset)");
}

/** What the form adds to a request; an empty field adds nothing, so the server's default holds. */
export function sampling() {
  const params = model.value ? { model: model.value } : {};
  for (const input of form.querySelectorAll("input[data-number]")) {
    if (input.value !== "") params[input.name] = Number(input.value);
  }
  const stop = form.elements.stop.value.split("\n").filter((line) => line !== "");
  if (stop.length) params.stop = stop.map(unescape);
  return params;
}

/** The system prompt, "" for none. */
export function systemPrompt() {
  return form.elements.system.value.trim();
}

/** "\n", "\t" and "\\" as people write them. */
function unescape(text) {
  return text.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter]);
}

async function loadModels() {
  let ids = [];
  try {
    ids = (await getJson("v1/models")).data.map((one) => one.id);
    note.textContent = "";
  } catch (error) {
    note.textContent = error.message;
  }
  const kept = model.value;
  model.replaceChildren(...ids.map((id) => new Option(id, id)));
  if (ids.includes(kept)) model.value = kept;
  tellModel();
}

function tellModel() {
  document.getElementById("model-name").textContent = model.value;
}

/** Fills the form and follows it. */
export function startSettings() {
  key.value = apiKey();
  key.addEventListener("change", () => {
    keepApiKey(key.value.trim());
    loadModels();
  });
  key.addEventListener("input", () => keepApiKey(key.value.trim()));
  model.addEventListener("change", tellModel);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => {
    const chosen = model.value;
    setTimeout(() => {
      key.value = apiKey(); // the key and the model are no sampling settings
      model.value = chosen;
    });
  });
  loadModels();
}
