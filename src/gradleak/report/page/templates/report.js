(() => {
  const list = document.getElementById("gallery");
  if (!list) return;
  const items = [...list.children];
  const control = (name) => document.getElementById("gallery-" + name);
  const shown = control("shown");
  const score = (item) => (item.dataset.score === "" ? -Infinity : Number(item.dataset.score));
  const orders = {
    run: (a, b) => items.indexOf(a) - items.indexOf(b),
    most: (a, b) => score(b) - score(a) || 0,
    least: (a, b) => score(a) - score(b) || 0,
  };
  function draw() {
    const attack = control("attack").value, defense = control("defense").value, kind = control("kind").value;
    const words = control("words").value.trim().toLowerCase();
    const fits = (item) =>
      (!attack || item.dataset.attack === attack) &&
      (!defense || item.dataset.defense === defense) &&
      (!kind || item.dataset[kind] === "yes") &&
      (!words || item.textContent.toLowerCase().includes(words));
    let count = 0;
    for (const item of items) {
      item.hidden = !fits(item);
      count += !item.hidden;
    }
    list.append(...[...items].sort(orders[control("order").value]));
    shown.textContent = count + " of " + items.length + " shown";
  }
  for (const name of ["attack", "defense", "kind", "order"]) control(name).addEventListener("change", draw);
  control("words").addEventListener("input", draw);
  document.getElementById("gallery-controls").hidden = false;
  draw();
})();
addEventListener("beforeprint", () => document.querySelectorAll("details:not(.screen)").forEach((one) => (one.open = true)));
