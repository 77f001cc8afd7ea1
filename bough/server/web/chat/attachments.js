/** Text files that go into a message: read, checked, and written below what the user says. */

export const MOST_FILE_BYTES = 256_000;

/** The text of a file: {name, text}. Throws Error if it is too large, or is no text. */
export async function readTextFile(file) {
  if (file.size > MOST_FILE_BYTES)
    throw new Error(
      `${file.name} has ${Math.ceil(file.size / 1000)} kB, and at most ${MOST_FILE_BYTES / 1000} kB are taken`,
    );
  const bytes = new Uint8Array(await file.arrayBuffer());
  try {
    if (bytes.includes(0)) throw new Error("a byte of zero");
    return { name: file.name, text: new TextDecoder("utf-8", { fatal: true }).decode(bytes) };
  } catch {
    throw new Error(`${file.name} is not a text file in UTF-8`);
  }
}

/** A message with files: each with its name, between fences that its own text does not have. */
export function writeMessage(text, files) {
  const parts = files.map(({ name, text: content }) => {
    const fence = "`".repeat(1 + Math.max(2, ...(content.match(/`+/g) ?? []).map((run) => run.length)));
    return `${name}:\n${fence}\n${content.replace(/\n$/, "")}\n${fence}`;
  });
  return [text.trim(), ...parts].filter(Boolean).join("\n\n");
}
