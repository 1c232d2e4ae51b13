"use strict";
// The pilot's page. It repeats its command twenty times a second: silence stops the robot.

const $ = (id) => document.getElementById(id);
const SEND_MS = 50;
const RECONNECT_MS = 1000;
const DRAG_PIXELS = 90; // from where a drag began to full speed
const WHEEL_MS = 150; // that one notch of the wheel moves the hand
const DEAD_ZONE = 0.12;

// Axis and direction of each key: x towards the viewer, y to the right, z up, and turns about them.
const KEYS = {
  KeyW: [0, -1], KeyS: [0, 1], KeyA: [1, -1], KeyD: [1, 1], KeyR: [2, 1], KeyF: [2, -1],
  KeyJ: [3, 1], KeyL: [3, -1], KeyI: [4, -1], KeyK: [4, 1], KeyQ: [5, 1], KeyE: [5, -1],
};
const PHASES = {
  offline: "not connected", unset: "◇ not reset", loading: "… building the simulator", ready: "○ ready", running: "● recording",
  paused: "❙❙ stopped", saving: "… saving", ended: "■ ended", waiting: "… between two episodes",
};

let socket = null;
let welcome = null;
let state = { phase: "offline", step: 0, pilot: "", in_control: "person", task: "", init_state: 0 };
let episodes = [];
let isPilot = false;
let gripper = "open";
let sequence = 0;
const sent = new Map(); // when each command was sent, until it is echoed
const held = new Map(); // keys, buttons and sticks that are held: name → axes
let wheel = { axis: 2, value: 0, until: 0 };
let dragFrom = null; // where the mouse was pressed on the scene, until its button is released
let pad = { axes: [0, 0, 0, 0, 0, 0], buttons: [] };

/* Connection */

function token() { return sessionStorage.getItem("token") || ""; }

function send(message) {
  if (socket && socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify(message));
}

function connect() {
  socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/socket`);
  socket.binaryType = "arraybuffer";
  socket.onopen = () => send({ type: "hello", token: token() });
  socket.onmessage = (event) => typeof event.data === "string" ? heard(JSON.parse(event.data)) : shown(event.data);
  socket.onclose = (event) => {
    isPilot = false;
    offset = Infinity;
    letGoOfAll(); // the end of a drag or of a key may not be heard after this
    setState({ ...state, phase: "offline", pilot: "" });
    if (event.code === 1008) askForToken();
    else setTimeout(connect, RECONNECT_MS);
  };
}

function askForToken() {
  $("token-form").hidden = false;
  if (token()) notice("the server refused this token", true);
  $("token").focus();
}

$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", $("token").value);
  $("token-form").hidden = true;
  connect();
});

function heard(message) {
  if (message.type === "state") setState(message);
  else if (message.type === "welcome") begin(message);
  else if (message.type === "episodes") { episodes = message.episodes; listEpisodes(); }
  else if (message.type === "controls") { isPilot = message.granted; sequence = 0; sent.clear(); refresh(); }
  else if (message.type === "question") ask(message);
  else if (message.type === "notice") notice(message.text, message.problem);
}

function begin(message) {
  welcome = message;
  forgetThumbnails();
  $("source").textContent = { record: `${message.suite} → data/imports/${message.source}`, train: `${message.suite}: rlpd trains`,
    ask: "what a run asks the person beside the robot" }[message.mode];
  for (const element of document.querySelectorAll("[data-modes]"))
    element.hidden = !element.dataset.modes.split(" ").includes(message.mode);
  if (message.mode === "train") text("instruction", "Take over, and you drive until you hand back. If this page is closed or silent while "
    + `you drive, the robot stops until somebody resumes. ${message.rule}`);
  $("policy-line").textContent = message.policy ? `Policy: ${message.policy}` : "No policy: you drive.";
  $("handover").hidden = !message.policy;
  fillTasks();
  makeViews(message.views);
  if (message.lost) notice(message.lost, true);
  if (sessionStorage.getItem("piloting") && $("who").value) claim(); // a reload in the middle
}

function claim() {
  localStorage.setItem("who", $("who").value);
  sessionStorage.setItem("piloting", "1");
  send({ type: "pilot", who: $("who").value });
}

/* State */

let offset = Infinity; // of our clock against the server's, at most

function setState(next) {
  const before = state;
  state = next;
  if (next.time !== undefined) offset = Math.min(offset, performance.now() - next.time * 1000);
  // The hand keeps what it holds: through a reset, a reload, and when a person takes over.
  if (next.gripper && (before.phase !== next.phase || next.in_control === "policy")) setGripper(next.gripper);
  measure(next.seq);
  refresh();
}

const trips = [];
function measure(seq) {
  const began = sent.get(seq);
  if (began === undefined) return;
  for (const key of sent.keys()) if (key <= seq) sent.delete(key);
  trips.push(performance.now() - began);
  if (trips.length > 40) trips.shift();
  $("round-trip").textContent = `${Math.round(median(trips))} ms`;
}

function median(values) { return [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)]; }

function text(id, value) { if ($(id).textContent !== value) $(id).textContent = value; }

function refresh() {
  const phase = state.phase;
  $("status").dataset.phase = phase;
  text("phase", phaseInWords());
  const hz = welcome ? welcome.control_hz : 20;
  const driving = welcome && welcome.policy && !(welcome.mode === "train" && phase === "running") ? (state.in_control === "policy" ? "the policy drives" : "you drive") : "";
  const taken = state.interventions ? `${state.interventions} ${state.interventions === 1 ? "step" : "steps"} taken over` : "";
  text("phase-detail", ["offline", "waiting"].includes(phase) ? "" : [
    [state.task, state.init_state !== undefined && `init state ${state.init_state}`].filter(Boolean).join(", "),
    `step ${state.step} (${(state.step / hz).toFixed(1)} s)`, `hand ${state.gripper}`, driving, taken].filter(Boolean).join(" · "));
  text("pilot-line", isPilot ? `You have the controls as ${state.pilot || $("who").value}.`
    : state.pilot ? `${state.pilot} has the controls; you are watching.` : "Nobody has the controls.");
  text("controls", isPilot ? "Give them back" : "Take the controls");
  $("controls").classList.toggle("primary", !isPilot);
  $("who").readOnly = isPilot;
  document.querySelector("#handover b").textContent = state.in_control === "policy" ? "Take over" : "Hand back";
  const training = welcome && welcome.mode === "train";
  document.querySelector("#start b").textContent =
    phase === "paused" || training ? "Resume" : phase === "ended" ? "Next episode" : phase === "unset" ? "Reset and start" : "Start";
  const playing = phase === "running" || phase === "paused";
  const markable = (playing || phase === "unset") && state.step > 0; // unset: it was over before the robot failed
  enable("start", isPilot && ["unset", "ready", "paused", "ended"].includes(phase));
  // A stop between two episodes holds before the next; a robot can be stopped while it resets.
  enable("pause", isPilot && (phase === "running" || (training && phase === "waiting") || (phase === "loading" && needsPilot())));
  enable("success", isPilot && markable);
  enable("failure", isPilot && markable);
  enable("handover", isPilot && ["ready", "running", "paused"].includes(phase));
  enable("reset", isPilot && phase !== "saving" && phase !== "loading");
  const isRead = performance.now() - question.since >= READ_MS;
  for (const id of ["yes", "no"]) enable(id, isPilot && isRead);
  text("question-hint", isPilot ? "" : "Take the controls to answer: one person says that no hand is in the way.");
  enable("undo", isPilot && ["unset", "ready", "ended"].includes(phase) && episodes.length > 0);
  enable("go", isPilot && phase !== "saving" && phase !== "loading");
}

function needsPilot() { return Boolean(welcome) && Boolean(welcome.needs_pilot); }

function phaseInWords() {
  if (state.awaits_motion) return "● armed: move to begin";
  if (state.phase === "waiting" && question.id) return "? the run waits for you";
  if (state.phase === "loading" && question.id) return "? the robot waits for you";
  if (state.phase === "loading" && needsPilot()) return "… the robot resets: keep clear";
  if (welcome && welcome.mode === "ask" && state.phase === "waiting") return "… nothing is asked now";
  if (state.phase !== "running" || !welcome || welcome.mode !== "train") return PHASES[state.phase];
  return state.in_control === "policy" ? "▶ the policy drives" : isPilot ? "◆ you drive" : `◆ ${state.pilot} drives`;
}

/* What a run asks the person beside the robot */

const QUESTIONS = {
  reset: { title: "Put the scene back, then press Ready", yes: "✓ Ready" },
  success: { title: "Is it done?", yes: "✓ Done", no: "✗ Not done" },
};
const READ_MS = 1000; // the second click on one question must not answer the next
let question = { id: "", since: 0 };

function ask(message) {
  question = { ...message, since: performance.now() };
  $("question").hidden = !message.id;
  if (message.id) {
    const words = QUESTIONS[message.kind];
    text("question-title", words.title);
    text("question-words", message.words);
    text("yes", words.yes);
    if (words.no) text("no", words.no);
    $("no").hidden = !words.no;
    setTimeout(refresh, READ_MS + 10);
  }
  refresh();
}

function answer(yes) {
  if ($("yes").disabled) return;
  send({ type: "answer", id: question.id, yes });
  question.since = Infinity; // once
  refresh();
}
$("yes").addEventListener("click", () => answer(true));
$("no").addEventListener("click", () => answer(false));

function enable(id, value) {
  const element = $(id);
  if (element.disabled !== !value) element.disabled = !value;
}

function notice(words, isProblem) {
  $("notice").textContent = words;
  $("notice").classList.toggle("problem", Boolean(isProblem));
}

/* Pictures */

const pictures = []; // img elements by the index of their view
const arrivals = [];

function makeViews(names) {
  $("views").replaceChildren(...names.map((name, index) => {
    const figure = document.createElement("figure");
    const image = document.createElement("img");
    image.alt = `${name} camera, live`;
    image.draggable = false;
    pictures[index] = image;
    const caption = document.createElement("figcaption");
    caption.textContent = name;
    figure.append(image, caption);
    return figure;
  }));
  $("views").classList.toggle("one", names.length === 1);
  if (pictures[0]) steerByDragging(pictures[0]);
}

function shown(buffer) {
  const header = new DataView(buffer);
  const picture = {
    image: pictures[header.getUint8(0)],
    isScene: header.getUint8(0) === 0,
    time: header.getFloat64(8, true),
    url: URL.createObjectURL(new Blob([new Uint8Array(buffer, 16)], { type: "image/jpeg" })),
  };
  const { image } = picture;
  if (!image.isLoading) load(picture);
  else { // never abort a picture that is being decoded; of those that wait the newest counts
    if (image.waiting) dismiss(image.waiting);
    image.waiting = picture;
  }
}

function load(picture) {
  const { image } = picture;
  image.isLoading = true;
  image.waiting = null;
  image.onload = image.onerror = () => {
    image.isLoading = false;
    dismiss(picture);
    if (image.waiting) load(image.waiting);
  };
  image.src = picture.url;
  if (picture.isScene) countPicture(picture.time);
}

function dismiss(picture) {
  URL.revokeObjectURL(picture.url);
  send({ type: "seen" }); // there is room for another
}

function countPicture(time) {
  const now = performance.now();
  if (state.phase === "running" && Number.isFinite(offset))
    text("picture-age", `${Math.max(0, Math.round(now - time * 1000 - offset))} ms`);
  arrivals.push(now);
  while (arrivals[0] < now - 2000) arrivals.shift();
  text("picture-rate", state.phase === "running" ? `${(arrivals.length / 2).toFixed(0)} /s` : "–");
}

/* Commands */

function axes() {
  const total = [0, 0, 0, 0, 0, 0];
  for (const vector of held.values()) vector.forEach((value, axis) => { total[axis] += value; });
  pad.axes.forEach((value, axis) => { total[axis] += value; });
  if (performance.now() < wheel.until) total[wheel.axis] += wheel.value;
  return total.slice(0, welcome.axes).map((value) => Math.max(-1, Math.min(1, value)));
}

function drive() {
  if (!isPilot || !welcome || document.hidden) return; // a hidden page lets go of the robot
  sequence += 1;
  sent.set(sequence, performance.now());
  if (sent.size > 200) sent.delete(sent.keys().next().value);
  send({ type: "drive", seq: sequence, axes: axes(), gripper, speed: Number($("speed").value) });
}

function along(axis, value) {
  const vector = [0, 0, 0, 0, 0, 0];
  vector[axis] = value;
  return vector;
}

function hold(name, vector) { held.set(name, vector); drive(); }
function letGo(name) { if (held.delete(name)) drive(); }
function letGoOfAll() {
  held.clear();
  dragFrom = null; // the mouse may move on with its button down
  wheel.until = 0;
  document.querySelectorAll(".held").forEach((button) => button.classList.remove("held"));
  drive();
}

function setGripper(word) {
  gripper = word;
  $("gripper").setAttribute("aria-pressed", String(word === "closed"));
  text("gripper-word", word === "open" ? "close hand" : "open hand");
}

function toggleGripper() { setGripper(gripper === "open" ? "closed" : "open"); drive(); }

function setSpeed(value) {
  $("speed").value = value;
  text("speed-value", `${Math.round($("speed").value * 100)} %`);
}

const ACTIONS = {
  start: () => send({ type: state.phase === "paused" ? "resume" : "start" }),
  pause: () => send({ type: "pause" }),
  success: () => send({ type: "mark", success: true }),
  failure: () => send({ type: "mark", success: false }),
  handover: () => send({ type: state.in_control === "policy" ? "take_over" : "hand_back" }),
  reset: () => send({ type: "reset", task: state.task, init_state: state.init_state }),
  undo: () => send({ type: "undo" }),
  go: () => send({ type: "reset", task: $("task").value,
    init_state: $("init-state").value === "" ? null : Number($("init-state").value) }),
};
const SHORTCUTS = { Enter: "start", KeyY: "success", KeyN: "failure", KeyT: "handover", KeyX: "reset", KeyZ: "undo" };

function act(name) {
  if ($(name).disabled || $(name).hidden) return;
  drive(); // the order comes after a command: the pilot is here
  ACTIONS[name]();
}

function stopRobot() { // whatever the state says: a start may be on its way
  if (!isPilot) return;
  drive();
  ACTIONS.pause();
}

for (const name of Object.keys(ACTIONS)) {
  $(name).addEventListener("click", (event) => {
    act(name);
    if (event.detail) $("cockpit").focus({ preventScroll: true }); // after a pointer the keys are the robot's again
  });
}

$("pilot-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (isPilot) { sessionStorage.removeItem("piloting"); send({ type: "release" }); }
  else claim();
  $("cockpit").focus({ preventScroll: true });
});

/* Keyboard */

function isTyping(target) { return target.matches("input:not([type=range]), select, textarea") || $("replay").open; }

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { // wherever the focus is
    if (!event.repeat) stopRobot();
    $("replay").close();
    event.preventDefault();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey) { letGoOfAll(); return; } // macOS tells of no keyup under Cmd
  if (isTyping(event.target)) return;
  const onControl = event.target.matches("button, a"); // that Space and Enter press
  if (KEYS[event.code]) hold(event.code, along(...KEYS[event.code]));
  else if (event.repeat) return;
  else if (event.code === "KeyG" || (event.code === "Space" && !onControl)) toggleGripper();
  else if (event.key === "+" || event.key === "=") setSpeed(Number($("speed").value) + 0.05);
  else if (event.key === "-") setSpeed(Number($("speed").value) - 0.05);
  else if (SHORTCUTS[event.code] && !(event.code === "Enter" && onControl)) act(SHORTCUTS[event.code]);
  else return;
  event.preventDefault();
});
document.addEventListener("keyup", (event) => event.key === "Meta" ? letGoOfAll() : letGo(event.code));
window.addEventListener("blur", letGoOfAll);
document.addEventListener("visibilitychange", letGoOfAll);

/* Pointer: buttons that are held, and the scene as a joystick */

for (const button of document.querySelectorAll("[data-move]")) {
  const vector = along(Number(button.dataset.move[0]), button.dataset.move[1] === "+" ? 1 : -1);
  const end = () => { button.classList.remove("held"); letGo(button); };
  button.addEventListener("pointerdown", (event) => {
    button.setPointerCapture(event.pointerId);
    button.classList.add("held");
    hold(button, vector);
  });
  for (const kind of ["pointerup", "pointercancel", "lostpointercapture", "blur"]) button.addEventListener(kind, end);
  button.addEventListener("keydown", (event) => { if (event.key === " " || event.key === "Enter") hold(button, vector); });
  button.addEventListener("keyup", end);
  button.addEventListener("contextmenu", (event) => event.preventDefault());
}
$("gripper").addEventListener("click", toggleGripper);
$("speed").addEventListener("input", () => setSpeed($("speed").value));

function steerByDragging(image) {
  image.addEventListener("pointerdown", (event) => { dragFrom = event; image.setPointerCapture(event.pointerId); });
  image.addEventListener("pointermove", (event) => {
    if (!dragFrom) return;
    const right = (event.clientX - dragFrom.clientX) / DRAG_PIXELS, down = (event.clientY - dragFrom.clientY) / DRAG_PIXELS;
    const vector = event.shiftKey ? [right, down, 0, 0, 0, 0].map((_, axis) => axis === 5 ? -right : axis === 4 ? down : 0)
      : [down, right, 0, 0, 0, 0];
    held.set("drag", vector);
  });
  const end = () => { dragFrom = null; letGo("drag"); };
  for (const kind of ["pointerup", "pointercancel", "lostpointercapture"]) image.addEventListener(kind, end);
  image.addEventListener("wheel", (event) => {
    event.preventDefault();
    wheel = { axis: 2, value: event.deltaY < 0 ? 1 : -1, until: performance.now() + WHEEL_MS };
  }, { passive: false });
}

/* Gamepad: left stick moves, right stick height and turn, A gripper, B stop, X failure, Y success, start, LB hand over */

const PAD_BUTTONS = { 0: toggleGripper, 1: stopRobot, 2: () => act("failure"), 3: () => act("success"),
  4: () => act("handover"), 9: () => act("start") };

function pollGamepad() {
  const found = [...(navigator.getGamepads ? navigator.getGamepads() : [])].find((one) => one && one.connected);
  text("gamepad", found ? `Gamepad: ${found.id.slice(0, 30)}` : "No gamepad.");
  if (!found) { pad = { axes: [0, 0, 0, 0, 0, 0], buttons: [] }; return; }
  const stick = (index) => Math.abs(found.axes[index] || 0) < DEAD_ZONE ? 0 : found.axes[index];
  const press = (index) => found.buttons[index] ? found.buttons[index].value : 0;
  const buttons = found.buttons.map((button) => button.pressed);
  for (const [index, call] of Object.entries(PAD_BUTTONS)) if (buttons[index] && !pad.buttons[index]) call();
  pad = { axes: [stick(1), stick(0), -stick(3), press(14) - press(15), press(13) - press(12), -stick(2)], buttons };
}

/* Tasks and episodes */

function fillTasks() {
  const chosen = $("task").value || state.task;
  $("task").replaceChildren(...welcome.tasks.map(({ name }) => new Option(name, name)));
  if (chosen) $("task").value = chosen;
  taskChosen();
}

function taskChosen() {
  const task = welcome.tasks.find(({ name }) => name === $("task").value);
  if (!task) return;
  const [first, last] = task.states;
  Object.assign($("init-state"), { min: first, max: last, placeholder: "next", value: "" });
  text("instruction", `“${task.language}” · training states ${first} to ${last}; empty takes the next`);
}
$("task").addEventListener("change", taskChosen);

let thumbnails = new Map(); // of this connection: another server may have other episodes of the same numbers

function forgetThumbnails() {
  for (const url of thumbnails.values()) URL.revokeObjectURL(url);
  thumbnails = new Map();
}

function headers() { return token() ? { Authorization: `Bearer ${token()}` } : {}; }

async function thumbnail(number) {
  const found = thumbnails; // an answer that comes after its connection counts for that one
  const answer = await fetch(`/episodes/${number}/thumbnail`, { headers: headers() });
  if (answer.ok) found.set(number, URL.createObjectURL(await answer.blob()));
  return found.get(number);
}

function listEpisodes() {
  const tally = new Map();
  for (const { task, success } of episodes) {
    const row = tally.get(task) || [0, 0];
    row[success ? 0 : 1] += 1;
    tally.set(task, row);
  }
  const total = [...tally.values()].reduce((sum, row) => [sum[0] + row[0], sum[1] + row[1]], [0, 0]);
  $("counts").tBodies[0].replaceChildren(...[...tally, ["all", total]].map(([name, [good, bad]]) => {
    const row = document.createElement("tr");
    for (const value of [name, good, bad, good + bad ? `${Math.round(100 * good / (good + bad))} %` : "–"])
      row.insertCell().textContent = value;
    return row;
  }));
  $("episodes").replaceChildren(...episodes.map(episodeItem));
  refresh();
}

function episodeItem(episode) {
  const item = document.createElement("li");
  const button = document.createElement("button");
  const image = document.createElement("img");
  image.alt = "";
  if (thumbnails.has(episode.number)) image.src = thumbnails.get(episode.number);
  else thumbnail(episode.number).then((url) => { if (url) image.src = url; });
  const words = document.createElement("span");
  const mark = document.createElement("b");
  mark.className = episode.success ? "good" : "bad";
  mark.textContent = episode.success ? "✓ success" : "✗ failure";
  const detail = document.createElement("small");
  const seconds = (episode.steps / welcome.control_hz).toFixed(1);
  const taken = episode.intervened ? `, ${episode.intervened} taken over` : "";
  const by = episode.source === "policy" ? "by the policy" : `by ${episode.who}`;
  detail.textContent = `${episode.task}, state ${episode.init_state} · ${episode.steps} steps, ${seconds} s${taken} · ${by}`;
  words.append(`#${episode.number} `, mark, detail);
  button.append(image, words);
  button.setAttribute("aria-label", `replay episode ${episode.number}: ${mark.textContent}, ${detail.textContent}`);
  button.addEventListener("click", () => replay(episode));
  item.append(button);
  return item;
}

/* Replay of what was shown */

let film = { frames: [], timer: 0 };

async function replay(episode) {
  const answer = await fetch(`/episodes/${episode.number}/film`, { headers: headers() });
  if (!answer.ok) { notice("this episode has no pictures on this machine", true); return; }
  film.frames = readFilm(await answer.arrayBuffer());
  $("replay-title").textContent = `Episode ${episode.number}: ${episode.task}, ${episode.success ? "✓ success" : "✗ failure"}`;
  $("replay-position").max = film.frames.length - 1;
  $("replay").showModal();
  playFrom(0);
}

function readFilm(buffer) {
  const view = new DataView(buffer), frames = [];
  for (let at = 0; at < buffer.byteLength;) {
    const step = view.getUint32(at, true), size = view.getUint32(at + 4, true);
    frames.push({ step, url: URL.createObjectURL(new Blob([new Uint8Array(buffer, at + 8, size)], { type: "image/jpeg" })) });
    at += 8 + size;
  }
  return frames;
}

function showFrame(index) {
  $("replay-position").value = index;
  $("replay-picture").src = film.frames[index].url;
  $("replay-picture").alt = `control step ${film.frames[index].step}`;
}

function playFrom(index) {
  clearTimeout(film.timer);
  showFrame(index);
  const next = film.frames[index + 1];
  $("replay-play").textContent = next ? "Pause" : "Again";
  if (next) film.timer = setTimeout(() => playFrom(index + 1), 1000 * (next.step - film.frames[index].step) / welcome.control_hz);
  else film.timer = 0;
}

$("replay-play").addEventListener("click", () => {
  const index = Number($("replay-position").value);
  if (film.timer) { clearTimeout(film.timer); film.timer = 0; $("replay-play").textContent = "Play"; }
  else playFrom(index + 1 < film.frames.length ? index : 0);
});
$("replay-position").addEventListener("input", () => { clearTimeout(film.timer); film.timer = 0;
  $("replay-play").textContent = "Play"; showFrame(Number($("replay-position").value)); });
$("replay-close").addEventListener("click", () => $("replay").close());
$("replay").addEventListener("close", () => {
  clearTimeout(film.timer);
  for (const { url } of film.frames) URL.revokeObjectURL(url);
  film = { frames: [], timer: 0 };
});

/* Go */

$("who").value = localStorage.getItem("who") || "";
setSpeed($("speed").value);
setInterval(() => { pollGamepad(); drive(); }, SEND_MS);
connect();
