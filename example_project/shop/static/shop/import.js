// Keeps the page of an import up to date. Without it the page works by reload.
"use strict";

const section = document.getElementById("import");

async function refresh() {
  const response = await fetch(section.dataset.statusUrl);
  if (!response.ok) throw new Error(`status ${response.status}`);
  const status = await response.json();
  for (const element of section.querySelectorAll("[data-show]")) {
    const text = String(status[element.dataset.show]);
    // Write only what changed: screen readers announce each write.
    if (element.textContent !== text) element.textContent = text;
  }
  section.querySelector("progress").value = status.percent;
  const cancel = section.querySelector("[data-cancel]");
  if (cancel) cancel.hidden = !status.can_cancel;
  return status.finished;
}

async function watch() {
  let finished = false;
  const trouble = section.querySelector("[data-connection]");
  try {
    finished = await refresh();
    trouble.hidden = true;
  } catch {
    trouble.hidden = false;
  }
  if (finished) location.reload(); // for the table of attempts
  else setTimeout(watch, 1000);
}

if (section.dataset.finished === "no") watch();
