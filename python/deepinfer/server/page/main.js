// Joins the parts of the page: settings, chat, charts. No part knows another one.
import { Chat } from "./chat.js";
import { Charts } from "./charts.js";

const by = (id) => document.getElementById(id);

const settings = {
  headers() {
    const key = by("key").value.trim();
    return key ? { authorization: `Bearer ${key}` } : {};
  },
  number(id) {
    const value = by(id).value.trim();
    return value === "" ? undefined : Number(value);
  },
  system: () => by("system").value,
};

function openSettings(open) {
  by("settings").hidden = !open;
  by("settings-toggle").setAttribute("aria-expanded", String(open));
}

const chat = new Chat(by("messages"), settings);

function tell(text, kind) {
  by("state").textContent = text;
  by("state").className = `state ${kind}`;
}

let lacksKey = false; // what the server said to the key that is there, or to none

async function findModel() {
  try {
    const answer = await fetch("v1/models", { headers: settings.headers() });
    lacksKey = answer.status === 401 || answer.status === 403;
    if (lacksKey) {
      tell("needs an API key", "down");
      openSettings(true);
      by("key").focus();
      return;
    }
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const models = await answer.json();
    chat.model = models.data[0].id;
    by("model").textContent = chat.model;
    document.title = `${chat.model} · DeepInfer`;
    tell("serving", "up");
  } catch (error) {
    tell("no answer from the server", "down");
  }
}

const charts = new Charts(by("charts"), settings, (seen) => {
  by("metrics-error").hidden = seen.error === null;
  by("metrics-error").textContent = seen.error ?? "";
  if (seen.up === null || (seen.up && lacksKey)) return;
  tell(seen.up ? "serving" : "the engine has stopped", seen.up ? "up" : "down");
  if (seen.up && !chat.model) findModel();
});

function working(on) {
  by("send").hidden = on;
  by("stop").hidden = !on;
}

async function ask() {
  const text = by("prompt").value;
  if (!text.trim() || chat.busy) return;
  by("prompt").value = "";
  if (!chat.model) await findModel();
  working(true);
  try {
    await chat.ask(text);
  } finally {
    working(false);
    by("prompt").focus();
  }
}

by("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
by("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask();
  }
});
by("stop").addEventListener("click", () => chat.stop());
by("clear").addEventListener("click", () => chat.clear());
by("settings").addEventListener("submit", (event) => event.preventDefault());
by("settings-toggle").addEventListener("click", () => openSettings(by("settings").hidden));
by("key").addEventListener("change", () => {
  findModel();
  charts.look();
});

findModel();
charts.start();
