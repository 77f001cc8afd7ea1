/** What all parts of the page share, and how a part follows what changes. */

import { createContext, useContext, useEffect, useRef, useState } from "../../vendor/preact-htm.js";

export const Services = createContext(null);

/** The services: conversations, answers, live, models, access and notices. */
export function useServices() {
  return useContext(Services);
}

/** A value of a store that has `subscribe`. The component is drawn again when the value is another one. */
export function useStore(store, select) {
  const latest = useRef(select);
  latest.current = select;
  const [, setValue] = useState(select);
  useEffect(() => {
    const update = () => setValue(() => latest.current());
    update();
    return store.subscribe(update);
  }, [store]);
  return select();
}

/** Put a text on the clipboard. Returns whether it worked. Pages by plain HTTP have only the old way. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "offscreen";
    document.body.append(area);
    area.select();
    const isDone = document.execCommand("copy");
    area.remove();
    return isDone;
  }
}

/** Let the user save a text as a file. */
export function saveFile(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
