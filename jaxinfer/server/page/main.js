// Starts the parts of the page, and switches views and themes.

import { startChat } from "./chat.js";
import { redraw, startLive } from "./live.js";
import { startSettings } from "./settings.js";

const THEMES = ["", "light", "dark"];
const WORDS = { "": "System", light: "Light", dark: "Dark" };
const root = document.documentElement;
let wake = () => {};

/** Brings one view to the front, where there is no room for all. */
function showView(name) {
  document.body.dataset.view = name;
  for (const button of document.querySelectorAll("nav [data-view]")) {
    button.setAttribute("aria-pressed", String(button.dataset.view === name));
  }
  wake();
}

function showTheme() {
  const theme = root.dataset.theme ?? "";
  const button = document.getElementById("theme");
  button.setAttribute("aria-label", `Theme: ${theme || "as the system"}`);
  button.title = button.getAttribute("aria-label");
  button.lastElementChild.textContent = WORDS[theme];
  button.firstElementChild.textContent = { "": "◐", light: "○", dark: "●" }[theme];
  redraw();
}

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(root.dataset.theme ?? "") + 1) % THEMES.length];
  if (theme) root.dataset.theme = theme;
  else delete root.dataset.theme;
  try {
    if (theme) localStorage.setItem("theme", theme);
    else localStorage.removeItem("theme");
  } catch {
    // it holds until the page is left
  }
  showTheme();
}

for (const button of document.querySelectorAll("nav [data-view]")) {
  button.addEventListener("click", () => showView(button.dataset.view));
}
document.getElementById("theme").addEventListener("click", nextTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
startSettings();
startChat(showView);
wake = startLive();
showTheme();
document.getElementById("message").focus();
