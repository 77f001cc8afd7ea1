/** The settings of one conversation. They are saved as they are typed; a wrong one keeps the next message from being sent. */

import { html } from "../../vendor/preact-htm.js";
import { NUMBERS } from "../parameters.js";
import { LEAVE_OUT, readSettings } from "../settings.js";
import { Dialog, Field } from "./controls.js";
import { useServices, useStore } from "./services.js";

const SCHEMA_EXAMPLE = '{"type": "object", "properties": {}}';
const TOOLS_EXAMPLE = `[{"type": "function", "function": {"name": "get_time", "parameters": ${SCHEMA_EXAMPLE}}}]`;

export function SettingsDialog({ conversation, actions, onClose }) {
  const { models } = useServices();
  const { settings } = conversation;
  const name = models.nameFor(conversation);
  const { capabilities, defaults = {} } = useStore(models, () => models.detailsOf(name)) ?? {};
  const { problems } = readSettings(settings);
  const set = (field) => (event) => actions.setSettings({ ...settings, [field]: event.target.value });
  return html`<${Dialog} title="Settings of this conversation" onClose=${onClose}>
    <p class="hint">An empty field leaves the choice to the model; its own value is shown in grey.</p>
    <div class="fields">
      ${NUMBERS.map(
        (number) =>
          html`<${Field} key=${number.name} label=${number.label} hint=${number.hint} problem=${problems[number.name]}>
            ${(attributes) =>
              html`<input
                inputmode="decimal"
                autocomplete="off"
                placeholder=${defaults[number.name] ?? ""}
                value=${settings[number.name] ?? ""}
                onInput=${set(number.name)}
                ...${attributes}
              />`}
          <//>`,
      )}
      <${Field} label="Stop strings" hint=${"One on each line; \\n stands for a line break."}>
        ${(attributes) => html`<textarea rows="2" value=${settings.stop ?? ""} onInput=${set("stop")} ...${attributes}></textarea>`}
      <//>
      <${Field} label="Format">
        ${(attributes) =>
          html`<select value=${settings.format ?? ""} onChange=${set("format")} ...${attributes}>
            <option value="">free</option>
            <option value="json">JSON</option>
            <option value="schema">JSON schema</option>
          </select>`}
      <//>
      <${Field} label="When the context is full">
        ${(attributes) =>
          html`<select value=${settings.full ?? ""} onChange=${set("full")} ...${attributes}>
            <option value="">stop and say so</option>
            <option value=${LEAVE_OUT}>leave the oldest messages out</option>
          </select>`}
      <//>
      ${
        capabilities?.includes("thinking") &&
        html`<${Field} label="Thinking">
          ${(attributes) =>
            html`<select value=${settings.think ?? ""} onChange=${set("think")} ...${attributes}>
              <option value="">as the model does</option>
              <option value="on">on</option>
              <option value="off">off</option>
            </select>`}
        <//>`
      }
    </div>
    ${
      settings.format === "schema" &&
      html`<${Field} label="JSON schema" problem=${problems.schema}>
        ${(attributes) =>
          html`<${JsonArea}
            placeholder=${SCHEMA_EXAMPLE}
            value=${settings.schema}
            onInput=${set("schema")}
            ...${attributes}
          />`}
      <//>`
    }
    <${Field} label="Tools" problem=${problems.tools} hint=${describeTools(capabilities, name)}>
      ${(attributes) =>
        html`<${JsonArea}
          placeholder=${TOOLS_EXAMPLE}
          value=${settings.tools}
          onInput=${set("tools")}
          ...${attributes}
        />`}
    <//>
    <div class="row">
      <button type="button" onClick=${() => actions.setSettings({})}>Clear all</button>
    </div>
  <//>`;
}

function JsonArea({ value = "", ...rest }) {
  return html`<textarea class="code-field" rows="5" spellcheck="false" value=${value} ...${rest}></textarea>`;
}

function describeTools(capabilities, name) {
  if (capabilities && !capabilities.includes("tools"))
    return `The chat template of ${name} knows no tools: the server refuses them.`;
  return "A list as JSON, as Ollama's and OpenAI's APIs take it. You write the results.";
}
