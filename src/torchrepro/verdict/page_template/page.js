"use strict";
(() => {
  const within = (value, end) => Math.max(0, Math.min(end - 1, value));
  const dataOf = (box) => JSON.parse(box.querySelector("script").textContent);
  const plain = (event) => !event.ctrlKey && !event.altKey && !event.metaKey;

  // Copy buttons: without a clipboard the text is selected, so that the keyboard copies it.
  const notice = document.getElementById("notice");
  for (const button of document.querySelectorAll("button.copy")) {
    const code = button.previousElementSibling;
    button.hidden = false;
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
        notice.textContent = "Copied.";
      } catch {
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
        notice.textContent = "Selected: copy it with the keyboard.";
      }
      setTimeout(() => { button.textContent = "Copy"; notice.textContent = ""; }, 2000);
    });
  }

  // The filter hides the modules, in the map and in the table, whose name does not contain a text.
  for (const filter of document.querySelectorAll(".filter")) {
    const every = [...filter.closest("article").querySelectorAll("[data-module]")];
    const rows = [...filter.closest("section").querySelectorAll(".row")];
    const input = filter.querySelector("input");
    filter.hidden = false;
    input.addEventListener("input", () => {
      const text = input.value.trim().toLowerCase();
      for (const each of every) each.hidden = !each.dataset.module.toLowerCase().includes(text);
      const shown = rows.filter((row) => !row.hidden).length;
      filter.querySelector("output").textContent = `${shown} of ${rows.length} modules`;
    });
  }

  for (const map of document.querySelectorAll(".map")) {
    const data = dataOf(map);
    const said = map.parentElement.querySelector(".said");
    const rows = [...map.querySelectorAll(".row")];
    const cursor = map.querySelector(".cursor");
    const width = data.columns.length;
    let [column, row] = data.marked;

    const nameOf = (first, last) => {
      if (first === data.after) return data.end;
      const before = last === data.after ? last - 1 : last;
      const steps = first === before ? `step ${first}` : `steps ${first} to ${before}`;
      return before === last ? steps : `${steps}, and ${data.end}`;
    };
    const show = () => {
      cursor.setAttribute("x", column);
      cursor.classList.add("on");
      rows[row].querySelector("svg").append(cursor);
      const at = 2 * (row * width + column);
      const [same, differing] = data.counts.slice(at, at + 2);
      const what = same + differing === 0 ? "no records"
        : differing === 0 ? `all ${same} records are the same`
        : `${differing} of ${same + differing} records differ`;
      said.textContent = `${nameOf(...data.columns[column])}, ${rows[row].title}: ${what}`;
    };

    map.addEventListener("pointermove", (event) => {
      const over = event.target.closest(".row");
      if (!over) return;
      const box = over.querySelector("svg").getBoundingClientRect();
      column = within(Math.floor((event.clientX - box.left) / box.width * width), width);
      row = rows.indexOf(over);
      show();
    });
    map.addEventListener("focus", show);
    map.addEventListener("keydown", (event) => {
      const [right, down] = {
        ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1],
        Home: [-width, 0], End: [width, 0], PageUp: [0, -rows.length], PageDown: [0, rows.length],
      }[event.key] || [];
      const visible = rows.filter((each) => !each.hidden);
      if (right === undefined || !plain(event) || !visible.length) return;
      event.preventDefault();
      column = within(column + right, width);
      row = rows.indexOf(visible[within(visible.indexOf(rows[row]) + down, visible.length)]);
      show();
    });
  }

  for (const plot of document.querySelectorAll(".plot")) {
    const data = dataOf(plot);
    const said = plot.parentElement.querySelector(".said");
    let at = data.marked;

    const show = () => {
      for (const line of plot.querySelectorAll(".cursor")) {
        for (const end of ["x1", "x2"]) line.setAttribute(end, data.at[at]);
        line.classList.add("on");
      }
      said.textContent = data.said[at];
    };

    plot.addEventListener("pointermove", (event) => {
      const svg = event.target.closest("svg");
      if (!svg) return;
      const x = new DOMPoint(event.clientX, 0).matrixTransform(svg.getScreenCTM().inverse()).x;
      at = data.at.reduce((best, each, here) =>
        Math.abs(each - x) < Math.abs(data.at[best] - x) ? here : best, 0);
      show();
    });
    plot.addEventListener("focus", show);
    plot.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, Home: -data.at.length, End: data.at.length }[event.key];
      if (!move || !plain(event)) return;
      event.preventDefault();
      at = within(at + move, data.at.length);
      show();
    });
  }
})();
