// Elements from plain data. Texts are text nodes: a token such as <img onerror=…> is shown, never parsed.

export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function status(text) {
  document.getElementById("status").textContent = text;
}

/** Loads a style sheet of this page, once. */
export function addStyle(file) {
  if (document.querySelector(`link[href="${file}"]`)) return null;
  return new Promise((resolve) => {
    document.head.append(element("link", { rel: "stylesheet", href: file, onload: resolve, onerror: resolve }));
  });
}

/** A table with a caption; the first cell of each row is its heading. */
export function table(caption, titles, rows) {
  return element("table", { class: "data" }, element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)))),
    element("tbody", {}, ...rows.map(([first, ...rest]) => element("tr", {}, element("th", { scope: "row" }, first), ...rest.map((text) => element("td", {}, text))))));
}
