// A conversation over /v1/chat/completions, streamed.

// Events of a stream: the text behind each "data:".
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const lines = rest.split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Text with fenced code set apart. Nodes only: nothing that a model writes is ever read as HTML.
export function paint(element, text) {
  const parts = text.split(/^```[^\n]*\n?/m);
  element.replaceChildren(
    ...parts.map((part, i) => {
      if (i % 2 === 0) return document.createTextNode(part);
      const block = document.createElement("pre");
      block.textContent = part;
      return block;
    }),
  );
}

class Message {
  constructor(role) {
    this.role = role;
    this.content = "";
    this.reasoning = "";
    this.element = document.createElement("article");
    this.element.className = `message ${role}`;
    this.body = document.createElement("div");
    this.body.className = "body";
    this.element.append(this.body);
  }

  add(text) {
    this.content += text;
    paint(this.body, this.content);
  }

  think(text) {
    this.reasoning += text;
    if (!this.thoughts) {
      const details = document.createElement("details");
      const summary = document.createElement("summary");
      summary.textContent = "Reasoning";
      this.thoughts = document.createElement("div");
      details.append(summary, this.thoughts);
      this.element.prepend(details);
    }
    this.thoughts.textContent = this.reasoning;
  }

  about(text) {
    const line = document.createElement("div");
    line.className = "about";
    line.textContent = text;
    this.element.append(line);
  }
}

export class Chat {
  constructor(container, settings) {
    this.container = container;
    this.settings = settings;
    this.model = "";
    this.messages = [];
    this.abort = null;
    this.empty = container.firstElementChild;
  }

  get busy() {
    return this.abort !== null;
  }

  stop() {
    this.abort?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.container.replaceChildren(this.empty);
  }

  show(message) {
    this.empty.remove();
    this.container.append(message.element);
    this.follow(true);
  }

  // Stays at the end unless the reader has scrolled away from it.
  follow(always) {
    const c = this.container;
    if (always || c.scrollHeight - c.scrollTop - c.clientHeight < 120) c.scrollTop = c.scrollHeight;
  }

  request() {
    const system = this.settings.system().trim();
    const said = this.messages.filter((m) => m.content).map((m) => ({ role: m.role, content: m.content }));
    return {
      model: this.model,
      messages: system ? [{ role: "system", content: system }, ...said] : said,
      stream: true,
      stream_options: { include_usage: true },
      temperature: this.settings.number("temperature"),
      max_tokens: this.settings.number("max-tokens"),
    };
  }

  async ask(text) {
    const question = new Message("user");
    question.add(text);
    this.messages.push(question);
    this.show(question);
    const body = JSON.stringify(this.request());
    const answer = new Message("assistant");
    answer.element.classList.add("working");
    this.messages.push(answer);
    this.show(answer);
    const abort = (this.abort = new AbortController());
    try {
      await this.read(answer, body, abort.signal);
    } catch (error) {
      if (abort.signal.aborted) {
        answer.about("stopped");
      } else {
        answer.element.classList.add("failed");
        answer.add((answer.content ? "\n" : "") + error.message);
        // What failed is not said again to the model.
        this.messages = this.messages.filter((m) => m !== answer && m !== question);
      }
    } finally {
      answer.element.classList.remove("working");
      if (this.abort === abort) this.abort = null;
      this.follow();
    }
  }

  async read(answer, body, signal) {
    const began = performance.now();
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...this.settings.headers() },
      body,
      signal,
    });
    if (!response.ok) throw new Error(await problem(response));
    let first = 0;
    let usage = null;
    let reason = null;
    for await (const data of events(response.body)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      const delta = choice?.delta ?? {};
      reason = choice?.finish_reason ?? reason;
      if (delta.reasoning_content) answer.think(delta.reasoning_content);
      if (delta.content) answer.add(delta.content);
      if (!first && (delta.content || delta.reasoning_content)) first = performance.now();
      this.follow();
    }
    answer.about(summary(usage, began, first, performance.now(), reason));
  }
}

async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

function summary(usage, began, first, ended, reason) {
  const parts = [];
  if (usage) {
    const tokens = usage.completion_tokens;
    const seconds = (ended - first) / 1000;
    parts.push(`${tokens} tokens`);
    if (tokens > 1 && seconds > 0) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    const cached = usage.prompt_tokens_details?.cached_tokens;
    if (cached) parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
  }
  if (first) parts.push(`first after ${Math.round(first - began)} ms`);
  if (reason && reason !== "stop") parts.push(`ended by ${reason}`);
  return parts.join(" · ");
}
