// Requests to the server of this page. A file written by `manyheads look --html` answers them from its own data.

const offline = document.getElementById("offline-data");
let session = null;

export const isOffline = offline !== null;

export class ApiError extends Error {
  constructor(answer) {
    super(answer.hint ? `${answer.message} (${answer.hint})` : answer.message);
    this.code = answer.code;
  }
}

async function request(method, path, body) {
  const response = await fetch(`api/${path}`, {
    method,
    headers: body === undefined ? {} : { "Content-Type": "application/json" },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!response.ok) {
    const type = response.headers.get("content-type") ?? "";
    throw new ApiError(type.includes("json") ? await response.json() : { code: "http", message: await response.text() });
  }
  return response;
}

export async function openSession() {
  session = (await (await request("POST", "session")).json()).session;
  // closing the tab frees what the server holds for it
  addEventListener("pagehide", () => navigator.sendBeacon(`api/session/${session}/close`));
}

export const getJson = async (path) => (await request("GET", `${path}${path.includes("?") ? "&" : "?"}session=${session}`)).json();
export const getBytes = async (path) => (await request("GET", `${path}${path.includes("?") ? "&" : "?"}session=${session}`)).arrayBuffer();
export const post = async (path, body) => (await request("POST", path, { session, ...body })).json();
