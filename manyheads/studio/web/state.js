// The state of the page is in its address, so that it can be reloaded, shared and gone back to.

const listeners = new Set();

export function read() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

export function write(changes, { replace = true } = {}) {
  const state = { ...read(), ...changes };
  for (const name of Object.keys(state)) if (state[name] === null || state[name] === "") delete state[name];
  const hash = `#${new URLSearchParams(state)}`;
  if (hash === location.hash) return;
  history[replace ? "replaceState" : "pushState"](null, "", hash);
  for (const listener of listeners) listener(state);
}

export function onChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

addEventListener("hashchange", () => {
  for (const listener of listeners) listener(read());
});
