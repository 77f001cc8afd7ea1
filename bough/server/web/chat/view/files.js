/** The text files that go with the next message. */

import { html, useRef, useState } from "../../vendor/preact-htm.js";
import { MOST_FILE_BYTES, readTextFile } from "../attachments.js";
import { writeCount } from "../figures.js";
import { IconButton } from "./controls.js";

/** Files that go with the next message. What cannot be taken is told as `note`. */
export function useFiles() {
  const [files, setFiles] = useState([]);
  const [note, setNote] = useState("");
  const add = async (list) => {
    const problems = [];
    for (const each of list) {
      try {
        const file = await readTextFile(each);
        setFiles((known) => [...known, file]);
      } catch (error) {
        problems.push(error.message);
      }
    }
    setNote(problems.join("; "));
  };
  const remove = (file) => setFiles((known) => known.filter((each) => each !== file));
  const clear = () => (setFiles([]), setNote(""));
  return { files, note, add, remove, clear };
}

export function FileList({ files, onRemove }) {
  return html`<ul class="files" aria-label="Files of this message">
    ${files.map(
      (file, number) =>
        html`<li key=${number}>
          <bdi>${file.name}</bdi>
          <span class="hint">${writeCount(file.text.length)} characters</span>
          <${IconButton} icon="close" label=${`Leave ${file.name} out`} onClick=${() => onRemove(file)} />
        </li>`,
    )}
  </ul>`;
}

export function FileButton({ onFiles }) {
  const input = useRef(null);
  const label = `Add text files, of at most ${MOST_FILE_BYTES / 1000} kB each`;
  const choose = (event) => {
    onFiles([...event.target.files]);
    event.target.value = "";
  };
  return html`
    <${IconButton} icon="clip" label=${label} onClick=${() => input.current.click()} />
    <input
      ref=${input}
      type="file"
      multiple
      class="offscreen"
      tabindex="-1"
      aria-label="Text files to add"
      onChange=${choose}
    />
  `;
}
