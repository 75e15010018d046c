// Follows a run: asks whether something changed, and only then for the page; keeps what is open and where one reads.
let version = "{{ live }}";

function openOnes() {
  return [...document.querySelectorAll("details")].map((d) => d.open);
}

async function look() {
  try {
    const state = await (await fetch("/state", { cache: "no-store" })).json();
    document.body.classList.remove("stale");
    if (state.version === version) return;
    const text = await (await fetch("/", { cache: "no-store" })).text();
    const page = new DOMParser().parseFromString(text, "text/html");
    const open = openOnes();
    for (const part of ["header.top", "main", "footer"]) {
      document.querySelector(part).replaceWith(page.querySelector(part));
    }
    document.querySelectorAll("details").forEach((d, i) => { if (i < open.length) d.open = open[i]; });
    version = state.version;
  } catch {
    document.body.classList.add("stale");
  }
}

setInterval(look, 2000);
