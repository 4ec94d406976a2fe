/** Requests to the server. Links are relative, because a proxy may serve it under any path. */

/** An error response of the server. */
export class Refused extends Error {
  /**
   * @param {string} message
   * @param {number} status the HTTP status; 0 inside a stream
   * @param {string} [param] the invalid field of the body
   */
  constructor(message, status, param) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** Keep the API key until the browser's tab is closed. @param {string} key */
export const keepKey = (key) => sessionStorage.setItem("key", key);

/**
 * Send a request with the API key. Throws `Refused`.
 * @param {string} path
 * @param {RequestInit} [options]
 */
export async function ask(path, options) {
  const key = sessionStorage.getItem("key");
  const headers = {
    "content-type": "application/json",
    ...(key ? { authorization: `Bearer ${key}` } : {}),
  };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new Refused(body.error?.message ?? `HTTP ${response.status}`, response.status,
    body.error?.param);
}

/**
 * Yield the data of a stream's events. Throws `Refused` for an error event.
 * @param {Response} response
 */
export async function* events(response) {
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop() ?? "";
    for (const part of parts) {
      if (!part.startsWith("data: ") || part === "data: [DONE]") continue;
      const event = JSON.parse(part.slice("data: ".length));
      if (event.error) throw new Refused(event.error.message, 0);
      yield event;
    }
  }
}
