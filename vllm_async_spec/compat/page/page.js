"use strict";
document.documentElement.classList.add("scripted");
const form = document.querySelector(".filters");
const rows = [...document.querySelectorAll("tbody tr")];
const card = document.querySelector(".card");
const dialog = document.querySelector("dialog");
const KINDS = ["release", "way", "machine"];

const chosen = (name) =>
  new Set([...form.querySelectorAll(`[data-filter="${name}"] input:checked`)].map((input) => input.value));

function filter() {
  const sets = Object.fromEntries([...KINDS, "class"].map((name) => [name, chosen(name)]));
  const everyClass = sets.class.size === form.querySelectorAll('[data-filter="class"] input').length;
  const text = form.querySelector("[type=search]").value.trim().toLowerCase();
  const shown = (cell) => KINDS.every((name) => sets[name].has(cell.dataset[name]));
  for (const head of document.querySelectorAll("thead th[data-release]")) head.hidden = !shown(head);
  let builders = 0;
  for (const row of rows) {
    let left = 0;
    for (const cell of row.querySelectorAll("td")) {
      cell.hidden = !shown(cell);
      const meant = everyClass || sets.class.has(cell.dataset.class);
      cell.classList.toggle("dimmed", !meant);
      if (!cell.hidden && meant) left += 1;
    }
    row.hidden = left === 0 || !row.dataset.backend.includes(text);
    if (!row.hidden) builders += 1;
  }
  form.querySelector(".count").textContent = `${builders} of ${rows.length} backends`;
  document.querySelector(".nothing").hidden = builders > 0;
}

// A click on one of several that are all on means that one alone; when none is left, all are meant.
function toggle(event) {
  const inputs = [...event.target.closest("fieldset").querySelectorAll("input")];
  const others = inputs.filter((input) => input !== event.target);
  if (others.length && others.every((input) => input.checked) && !event.target.checked) {
    for (const input of others) input.checked = false;
    event.target.checked = true;
  } else if (inputs.every((input) => !input.checked)) {
    for (const input of inputs) input.checked = true;
  }
}

const evidence = (link) => document.getElementById(link.getAttribute("href").slice(1));

function brief(link) {
  const article = evidence(link).cloneNode(true);
  article.removeAttribute("id");
  for (const item of [...article.querySelectorAll("li")].slice(3)) item.remove();
  card.replaceChildren(...article.childNodes);
  card.hidden = false;
}

function whole(link) {
  const article = evidence(link).cloneNode(true);
  article.removeAttribute("id");
  dialog.querySelector("div").replaceChildren(article);
  card.hidden = true;
  dialog.showModal();
}

form.hidden = false;
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", (event) => {
  if (event.target.type === "checkbox") toggle(event);
  filter();
});
for (const link of document.querySelectorAll("td a.chip")) {
  link.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && brief(link));
  link.addEventListener("pointerleave", () => (card.hidden = true));
  link.addEventListener("focus", () => link.matches(":focus-visible") && brief(link));
  link.addEventListener("blur", () => (card.hidden = true));
  link.addEventListener("click", (event) => {
    event.preventDefault();
    whole(link);
  });
}
dialog.querySelector(".close").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
filter();
