// The app: one module per tab. A tab has a title and show(root), which returns a function that removes it.

import { openSession, isOffline } from "./api.js";
import { element, status } from "./dom.js";
import * as field from "./field.js";
import * as look from "./look.js";
import * as model from "./model.js";
import * as probe from "./probe.js";
import { onChange, read, write } from "./state.js";
import { openTour } from "./tour.js";

const TABS = isOffline ? { look } : { look, model, probe, field };
let current = null;
let remove = null;

async function showTab() {
  const name = Object.hasOwn(TABS, read().tab ?? "") ? read().tab : "look";
  if (name === current) return;
  current = name;
  remove?.();
  const root = document.getElementById("tab");
  root.replaceChildren();
  for (const button of document.querySelectorAll("nav [role=tab]")) {
    button.setAttribute("aria-selected", String(button.id === `tab-${name}`));
  }
  try {
    remove = await TABS[name].show(root);
  } catch (error) {
    status(error.message);
  }
}

const tabs = Object.entries(TABS).map(([name, tab]) =>
  element("button", { role: "tab", id: `tab-${name}`, type: "button", onclick: () => write({ tab: name }) }, tab.title),
);
document.querySelector("nav").append(...tabs);
onChange(showTab);
await openSession();
if (!isOffline) await openTour();
await showTab();
