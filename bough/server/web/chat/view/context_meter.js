/** How much of the model's context is used, and what the user wants where the next turn does not fit. */

import { html } from "../../vendor/preact-htm.js";
import { describeFull, isFull, measureContext } from "../context.js";
import { writeCount } from "../figures.js";
import { LEAVE_OUT } from "../settings.js";
import { useServices, useStore } from "./services.js";

/** Below the field to write in; `draft` is the next message as it would be sent. */
export function ContextMeter({ conversation, draft, actions }) {
  const { live, models } = useServices();
  const name = models.nameFor(conversation);
  useStore(live, () => live.models);
  const context = useStore(models, () => models.contextOf(name));
  if (!context) return null;
  const measured = measureContext(conversation, draft, context);
  const { settings } = conversation;
  const leavesOut = settings.full === LEAVE_OUT;
  const used = measured.used + measured.coming;
  return html`<div class="context">
    <span class="context-bar" aria-hidden="true">
      <span
        class=${isFull(measured) ? "is-full" : ""}
        style=${{ width: `${Math.min(100, (100 * used) / context)}%` }}
      ></span>
    </span>
    <span>${writeCount(used)} of ${writeCount(context)} tokens</span>
    ${
      isFull(measured) &&
      html`<p class="context-full" role="status">
        ${describeFull(measured, leavesOut)}
        ${
          !leavesOut &&
          html`<button
            type="button"
            class="small"
            onClick=${() => actions.setSettings({ ...settings, full: LEAVE_OUT })}
          >
            Leave the oldest messages out
          </button>`
        }
      </p>`
    }
  </div>`;
}
