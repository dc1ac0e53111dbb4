// Requests to the server that served this page, with the token of this tab where the server needs one.

const TOKEN = "headstock-token";

export class ApiError extends Error {}

export const hasToken = () => sessionStorage.getItem(TOKEN) !== null;

async function request(path, options = {}) {
  for (let attempt = 0; ; attempt += 1) {
    const headers = { ...options.headers };
    const token = sessionStorage.getItem(TOKEN);
    if (token) headers.Authorization = `Bearer ${token}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server does not answer. Is it still running?");
    }
    if (response.status === 401) {
      await askToken(token !== null);
      continue;
    }
    if (!response.ok) throw new ApiError(await problemOf(response));
    return response;
  }
}

async function problemOf(response) {
  try {
    const { error, detail } = await response.json();
    if (error) return error.message;
    return JSON.stringify(detail);
  } catch {
    return `The server answered ${response.status}.`;
  }
}

let asking = null;

function askToken(refused) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("token-dialog");
    const field = document.getElementById("token");
    document.getElementById("token-problem").hidden = !refused;
    field.value = "";
    const close = () => {
      dialog.removeEventListener("close", close);
      sessionStorage.setItem(TOKEN, field.value.trim());
      field.value = "";
      asking = null;
      resolve();
    };
    dialog.addEventListener("close", close);
    dialog.showModal();
  });
  return asking;
}

// A cookie for what the browser loads by its address, such as frames, which cannot send the token.
export async function login() {
  if (hasToken()) await request("/login", { method: "POST" });
}

export async function get(path, options) {
  return (await request(path, options)).json();
}

export async function post(path, body, options = {}) {
  const headers = { "Content-Type": "application/json" };
  return (await request(path, { method: "POST", headers, body: JSON.stringify(body), ...options })).json();
}

// Calls `onEvent` with each event of a server-sent stream, until it ends or `signal` aborts it.
export async function stream(path, { body, headers = { "Content-Type": "application/json" }, signal }, onEvent) {
  const response = await request(path, { method: "POST", headers: { Accept: "text/event-stream", ...headers }, body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const events = buffer.split(/\r?\n\r?\n/);
    buffer = events.pop();
    for (const event of events) {
      const data = event.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (!data.length || data[0] === "[DONE]") continue;
      const message = JSON.parse(data.join("\n"));
      if (message.error) throw new ApiError(message.error.message);
      onEvent(message);
    }
  }
}
