/** How much of a model's context a conversation takes, and whether the next turn fits. */

import { activePath } from "./conversation.js";
import { writeCount } from "./figures.js";

const USUAL_CHARACTERS = 4; // of a token
const FEWEST_CHARACTERS = 1;
const UNLIMITED_SHARE = 8; // an answer without a limit is given this part of the context

/**
 * `used`: tokens of the path that is shown; `coming`: those of a draft; `answer`: the room that an answer should have. Exact up
 * to the last answer, because the server has counted them; what came after it is estimated from its characters.
 */
export function measureContext(conversation, draft, context) {
  const path = activePath(conversation);
  const at = path.findLastIndex((message) => message.figures?.prompt_tokens);
  const known = at < 0 ? 0 : path[at].figures.prompt_tokens + (path[at].figures.completion_tokens ?? 0);
  const perToken = charactersPerToken(path.slice(0, at + 1), known);
  const used = known + Math.ceil(countCharacters(path.slice(at + 1)) / perToken);
  const limit = Number(conversation.settings.num_predict);
  const answer = limit > 0 ? limit : Math.floor(context / UNLIMITED_SHARE);
  return { used, coming: Math.ceil(draft.length / perToken), answer, context };
}

/** Whether the conversation, the draft and an answer do not fit together. */
export function isFull({ used, coming, answer, context }) {
  return used + coming + answer > context;
}

/** Why the next turn does not fit, in one sentence. */
export function describeFull({ used, coming, answer, context }, leavesOut) {
  const sizes = `About ${writeCount(used + coming)} tokens and room for an answer of ${writeCount(answer)}`;
  const end = leavesOut ? "the oldest messages are left out" : "the answer has less room, or the server refuses";
  return `${sizes} are more than the ${writeCount(context)} that this model can read: ${end}.`;
}

function charactersPerToken(path, tokens) {
  const characters = countCharacters(path);
  return tokens && characters
    ? Math.max(FEWEST_CHARACTERS, Math.min(USUAL_CHARACTERS, characters / tokens))
    : USUAL_CHARACTERS;
}

function countCharacters(messages) {
  return messages.reduce((sum, { content, thinking = "" }) => sum + content.length + thinking.length, 0);
}
