// Requests to the server of this page. A file written by `manyheads look --html` answers them from its own data.

const offline = document.getElementById("offline-data");
let session = null;
let stored = null; // of an offline file: the bytes of each answer by its path

export const isOffline = offline !== null;

// a path with its query, whose order an offline file relies on
export const query = (path, parameters) => `${path}?${new URLSearchParams(parameters)}`;

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
  if (isOffline) {
    stored = await readStored();
    return;
  }
  session = (await (await request("POST", "session")).json()).session;
  // closing the tab frees what the server holds for it
  addEventListener("pagehide", () => navigator.sendBeacon(`api/session/${session}/close`));
}

// ------------------------------------------------------------------------------------------- offline

async function readStored() {
  const bytes = Uint8Array.from(atob(offline.textContent.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const index = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  return new Map(Object.entries(index).map(([path, [start, size, type]]) => {
    const part = buffer.slice(4 + length + start, 4 + length + start + size);
    return [path, () => (type === "float16" ? fromFloat16(part) : part)];
  }));
}

function fromFloat16(buffer) {
  const floats = Float32Array.from(new Uint16Array(buffer), (bits) => {
    const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
    const size = exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24;
    return bits & 0x8000 ? -size : size;
  });
  return floats.buffer;
}

function answer(path) {
  const found = stored.get(path);
  if (!found) throw new ApiError({ code: "offline", message: "this file does not hold it", hint: "open the page with manyheads look" });
  return found();
}

const answerJson = (path) => JSON.parse(new TextDecoder().decode(answer(path)));
const withSession = (path) => `${path}${path.includes("?") ? "&" : "?"}session=${session}`;

export const getJson = async (path) => (isOffline ? answerJson(path) : (await request("GET", withSession(path))).json());
export const getBytes = async (path) => (isOffline ? answer(path) : (await request("GET", withSession(path))).arrayBuffer());
export const post = async (path, body) => (isOffline ? answerJson(path) : (await request("POST", path, { session, ...body })).json());
