// Follows a run: asks whether something changed, and only then for the page; keeps what is open and where one reads.
// A request that is not answered well changes nothing on the page but the line that says so, and the next look mends it.
const PARTS = ["header.top", "main", "footer"];
const PAUSE_MS = 2000;
const DEADLINE_MS = 60000;  // a page of a long run takes seconds to make
let version = "{{ live }}";

class NotNow extends Error {}  // the server is there and has no page at the moment

async function get(path) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(DEADLINE_MS) });
  if (!answer.ok) throw new NotNow(answer.status);
  return answer;
}

function folds(root) {
  return [...root.querySelectorAll("details[data-key]")];
}

function show(text) {
  const page = new DOMParser().parseFromString(text, "text/html");
  const pairs = PARTS.map((part) => [document.querySelector(part), page.querySelector(part)]);
  if (pairs.some((pair) => pair.includes(null))) throw new NotNow("a page without its parts");
  const open = new Map(folds(document).map((fold) => [fold.dataset.key, fold.open]));
  const focused = document.activeElement?.closest("summary")?.parentElement.dataset.key;
  for (const fold of folds(page)) {
    if (open.has(fold.dataset.key)) fold.open = open.get(fold.dataset.key);
  }
  for (const [old, made] of pairs) old.replaceWith(made);
  folds(document).find((fold) => fold.dataset.key === focused)?.querySelector("summary").focus({ preventScroll: true });
}

function tell(text) {
  const line = document.getElementById("link");
  if (line.textContent !== text) line.textContent = text;
}

async function look() {
  try {
    const state = await (await get("/state")).json();
    if (state.version !== version) {
      show(await (await get("/")).text());
      version = state.version;
    }
    tell("");
  } catch (error) {
    tell(error instanceof NotNow ? "Waiting for the run: nothing newer can be read at the moment."
      : "Not answered: cadenza watch has ended, or cannot be reached. Trying again.");
  }
  setTimeout(look, PAUSE_MS);
}

setTimeout(look, PAUSE_MS);
