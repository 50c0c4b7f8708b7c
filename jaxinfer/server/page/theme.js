// Sets the theme before the first paint; a classic script, since a module would run after it.
"use strict";
{
  const kept = (() => {
    try {
      return localStorage.getItem("theme");
    } catch {
      return null; // storage may be switched off
    }
  })();
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
}
