// Requests to the server that sent this page, and its errors in words. Addresses are relative: it may sit behind a prefix.

const KEY = "api_key";
let memory = ""; // where the browser refuses storage

/** The API key, kept until the tab closes. */
export function apiKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return memory;
  }
}

export function keepApiKey(value) {
  memory = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    // kept in memory only
  }
}

/** An answer that is no answer; its message is for people. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function request(path, options = {}) {
  const key = apiKey();
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error instanceof TypeError && /header|ISO-8859-1|ByteString/i.test(error.message)) {
      throw new ServerError("The API key has a character that no key can have. Write it again under Settings.");
    }
    throw new ServerError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  const body = await response.json().catch(() => null);
  const detail = typeof body?.detail === "string" ? body.detail : "";
  const said = String(body?.error?.message ?? body?.message ?? detail);
  const wait = Number(response.headers.get("Retry-After"));
  return new ServerError(inWords(response.status, said, wait), response.status);
}

function inWords(status, said, wait) {
  const tail = said ? `: ${said}` : ".";
  if (status === 401 || status === 403) {
    const wrong = apiKey() ? "The server does not know this API key" : "The server asks for an API key";
    return `${wrong}. Write it under Settings, API key.`;
  }
  if (status === 429 || status === 503) {
    const when = wait > 0 ? ` Try again in ${wait} s.` : "";
    return `The server takes no more requests now${tail}${when && !/[.!]$/.test(tail) ? "." : ""}${when}`;
  }
  if (status === 408 || status === 504) return `The request ran out of time${tail}`;
  if (status === 413) return `The message is larger than the server takes${tail}`;
  if (status >= 500) return `The server failed (${status})${tail}`;
  return `The server refused the request (${status})${tail}`;
}

/** GETs JSON. */
export async function getJson(path, signal) {
  return (await request(path, { signal })).json();
}

/** POSTs a chat and yields the stream's objects until [DONE]. */
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of eventsOf(response.body.getReader())) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(`The server failed: ${chunk.error.message ?? "it did not say why"}`);
    yield chunk;
  }
  throw new ServerError("The connection ended before the answer did.");
}

/** The data of server-sent events; each of ours is one line. */
async function* eventsOf(reader) {
  const decoder = new TextDecoder();
  let rest = "";
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ServerError) throw error;
    throw new ServerError("The connection broke while the answer was coming.");
  } finally {
    reader.cancel().catch(() => {}); // leaving early tells the server to stop
  }
}
