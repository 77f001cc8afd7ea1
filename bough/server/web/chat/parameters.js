/**
 * The numbers that a user may give, under the names of `options`. An empty field leaves the choice to the model.
 * Made by `make docs` from bough/sampling_params.py.
 */
export const NUMBERS = [
  {"name": "num_predict", "label": "Max tokens", "least": -1, "most": null, "isAbove": false, "isWhole": true, "hint": "The most tokens to generate; -1: to the context's end."},
  {"name": "temperature", "label": "Temperature", "least": 0, "most": null, "isAbove": false, "isWhole": false, "hint": "0: always take the likeliest token."},
  {"name": "top_k", "label": "Top k", "least": 0, "most": null, "isAbove": false, "isWhole": true, "hint": "Sample from the k likeliest tokens; 0: all."},
  {"name": "top_p", "label": "Top p", "least": 0, "most": 1, "isAbove": false, "isWhole": false, "hint": "Sample from the likeliest tokens up to this total probability."},
  {"name": "min_p", "label": "Min p", "least": 0, "most": 1, "isAbove": false, "isWhole": false, "hint": "Drop tokens below this fraction of the best probability."},
  {"name": "top_n_sigma", "label": "Top n sigma", "least": 0, "most": null, "isAbove": false, "isWhole": false, "hint": "Drop tokens whose logit is more than n standard deviations below the largest, as in llama.cpp; 0: none."},
  {"name": "repeat_penalty", "label": "Repeat penalty", "least": 0, "most": null, "isAbove": true, "isWhole": false, "hint": "Above 1: repeat less; 1: no penalty."},
  {"name": "repeat_last_n", "label": "Repeat last n", "least": -1, "most": null, "isAbove": false, "isWhole": true, "hint": "How many of the last tokens count as repeated; -1: the whole context, 0: none."},
  {"name": "presence_penalty", "label": "Presence penalty", "least": -2, "most": 2, "isAbove": false, "isWhole": false, "hint": "Above 0: avoid tokens that were there before."},
  {"name": "frequency_penalty", "label": "Frequency penalty", "least": -2, "most": 2, "isAbove": false, "isWhole": false, "hint": "Above 0: avoid tokens, the more the more often they were there before."},
  {"name": "seed", "label": "Seed", "least": null, "most": null, "isAbove": false, "isWhole": true, "hint": "The same seed gives the same text."},
];
