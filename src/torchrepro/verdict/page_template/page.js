"use strict";
(() => {
  const svg = document.getElementById("cells");
  if (!svg) return;
  const said = document.getElementById("map-said");
  const cursor = document.getElementById("cursor");
  const map = JSON.parse(document.getElementById("map-data").textContent);
  const width = map.columns.length;
  const height = map.rows.length;
  let [column, row] = map.marked || [0, 0];

  const nameOf = (first, last) => {
    if (first === map.after) return map.ends[1] || map.ends[0];
    const before = last === map.after ? last - 1 : last;
    const steps = first === before ? `step ${first}` : `steps ${first} to ${before}`;
    return before === last ? steps : `${steps}, and ${map.ends[1]}`;
  };
  const show = () => {
    cursor.setAttribute("x", column);
    cursor.setAttribute("y", row);
    const [first, last] = map.columns[column];
    const at = 2 * (row * width + column);
    const [same, differing] = map.counts.slice(at, at + 2);
    const steps = nameOf(first, last);
    const what = same + differing === 0 ? "no records"
      : differing === 0 ? `all ${same} records are the same`
      : `${differing} of ${same + differing} records differ`;
    said.textContent = `${steps}, ${map.rows[row] || "(no module)"}: ${what}`;
  };
  const within = (value, end) => Math.max(0, Math.min(end - 1, value));

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    column = within(Math.floor((event.clientX - box.left) / box.width * width), width);
    row = within(Math.floor((event.clientY - box.top) / box.height * height), height);
    show();
  });
  svg.addEventListener("focus", show);
  svg.addEventListener("keydown", (event) => {
    const moves = {
      ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1],
      Home: [-width, 0], End: [width, 0], PageUp: [0, -height], PageDown: [0, height],
    };
    const move = moves[event.key];
    if (!move || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    column = within(column + move[0], width);
    row = within(row + move[1], height);
    show();
  });
})();
