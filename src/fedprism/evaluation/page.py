"""The HTML of the report: one style sheet and one template. Nothing in it is loaded from elsewhere.

`reports.write_report` fills the template, every value escaped. A table is what `reports._grid` gives.
"""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark;
  --page: #ffffff; --ink: #1f2328; --soft: #5b6470; --line: #dfe3e8; --band: #f5f7f9; --link: #0059b3;
  --best: #e3f1e6; --down: #b3401c; --up: #1c6b3c; --warn: #fff3d6; --warn-line: #c98a00; }
@media (prefers-color-scheme: dark) { :root {
  --page: #15181c; --ink: #e6e8eb; --soft: #a2abb6; --line: #343a42; --band: #1d2126; --link: #7ab8ff;
  --best: #1f3d29; --down: #ff9a76; --up: #7fd6a0; --warn: #3a2f12; --warn-line: #d9a320; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 5rem; max-width: 62rem;
  background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.3rem; margin: 3rem 0 .6rem; padding-top: .9rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.02rem; margin: 1.6rem 0 .4rem; }
p, ul { margin: .5rem 0; max-width: 46rem; }
a { color: var(--link); }
.facts { color: var(--soft); margin-top: 0; max-width: none; }
.lead { font-size: 1.08rem; }
.lead ul { padding-left: 1.2rem; }
nav { background: var(--band); border-radius: 8px; padding: .8rem 1.1rem; margin: 1.4rem 0; }
nav ul { list-style: none; margin: 0; padding: 0; max-width: none; columns: 3 14rem; column-gap: 1.5rem; }
nav li { padding: .1rem 0; break-inside: avoid; }
.warn { background: var(--warn); border-left: 5px solid var(--warn-line); border-radius: 4px;
  padding: .6rem 1rem; margin: 1rem 0; }
.warn p { max-width: none; }
.how { color: var(--soft); font-size: .94rem; }
.how b { color: var(--ink); }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .7rem; text-align: right; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); vertical-align: bottom; }
td { white-space: nowrap; vertical-align: top; }
tbody tr:hover { background: var(--band); }
.name, .text { text-align: left; }
td.name { font-weight: 600; }
td.text { white-space: normal; }
.part { border-left: 1px solid var(--line); }
td.best { background: var(--best); font-weight: 700; }
td.up { color: var(--up); }
td.down { color: var(--down); }
.sd { display: block; font-size: .78rem; line-height: 1.2; color: var(--soft); font-weight: 400; }
.small { font-size: .82rem; color: var(--soft); }
figure { margin: 1rem 0; padding: .7rem; max-width: 832px;
  background: #ffffff; border: 1px solid var(--line); border-radius: 8px; }
figure img { display: block; width: 100%; height: auto; }
figcaption { color: #444b55; font-size: .86rem; padding: .3rem .2rem 0; }
details { margin: .8rem 0; border: 1px solid var(--line); border-radius: 8px; padding: .5rem .9rem; }
summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; background: var(--band); padding: .8rem; border-radius: 6px;
  font-size: .82rem; line-height: 1.45; }
code { font-size: .9em; overflow-wrap: anywhere; }
@media print {
  body { max-width: none; }
  h2 { break-after: avoid; }
  figure { break-inside: avoid; }
}
"""

TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ name }} - fedprism report</title>
<style>{{ style | safe }}</style>
</head>
<body>

{% macro grid(table) %}
<div class="scroll"><table>
<thead><tr>
{% for column in table.columns %}
<th class="{{ column.kind }}">{{ column.title }}</th>
{% endfor %}
</tr></thead>
<tbody>
{% for row in table.rows %}
<tr>
{% for cell in row %}
{% set kind = table.columns[loop.index0].kind %}
<td class="{{ kind }} {{ cell.tone }}"{% if cell.tip %} title="{{ cell.tip }}"{% endif %}>{{ cell.text }}
{%- if cell.below %}<span class="sd">{{ cell.below }}</span>{% endif %}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody></table></div>
{% endmacro %}

{% macro picture(kind, alt) %}
{% for item in pictures.get(kind, []) %}
<figure>
<img src="{{ item.source }}" alt="{{ alt }}{% if item.label %} ({{ item.label }}){% endif %}">
{% if item.label %}<figcaption>{{ item.label }}</figcaption>{% endif %}
</figure>
{% endfor %}
{% endmacro %}

{% macro link(shown, target, title) %}
{% if shown %}<li><a href="#{{ target }}">{{ title }}</a></li>{% endif %}
{% endmacro %}

<header>
<h1>{{ name }}</h1>
<p class="facts">{{ methods | length }} method{{ "s" if methods | length != 1 }}
{% if clients %} · {{ clients | join(" or ") }} clients{% endif %}
{% if tasks %} · {{ tasks | length }} tasks ({{ tasks | join(", ") }}){% endif %}
 · seed{{ "s" if seeds | length != 1 }} {{ seeds | join(", ") }}
{% if version %} · fedprism {{ version }}{% endif %}</p>
</header>

{% if warnings %}
<div class="warn" role="alert">
{% for line in warnings %}<p><b>Warning.</b> {{ line }}</p>{% endfor %}
</div>
{% endif %}
{% if n_incomplete %}
<div class="warn"><p><b>{{ n_incomplete }} incomplete run{{ "s" if n_incomplete != 1 }}</b>, in no mean
below: <a href="#incomplete">how far {{ "they" if n_incomplete != 1 else "it" }} got</a>.</p></div>
{% endif %}

<div class="lead">
<p>{{ headline[0] }}</p>
{% if headline | length > 1 %}
<ul>{% for line in headline[1:] %}<li>{{ line }}</li>{% endfor %}</ul>
{% endif %}
</div>

<nav aria-label="Contents">
<ul>
{{ link(results, "results", "Accuracy") }}
{{ link(differences, "differences", "Paired differences") }}
{{ link(outside, "outside", "Queries whose owner is hidden") }}
{{ link(has_local, "negative", "Negative transfer") }}
{{ link(n_incomplete, "incomplete", "Incomplete runs") }}
{{ link("learning_curves" in pictures, "curves", "Learning curves") }}
{{ link(client_tables, "clients", "Accuracy per client") }}
{{ link(mixture, "mixtures", "Estimated mixtures") }}
{{ link("public_losses" in pictures, "losses", "Table of public losses") }}
{{ link(hulls, "hulls", "Where the experts lie") }}
{{ link("expert_usage" in pictures, "usage", "Expert usage") }}
{{ link(geometry, "geometry", "Geometry") }}
{{ link(costs, "costs", "Communication and time") }}
{{ link(published, "published", "Published values") }}
{{ link(federations, "federation", "The federation") }}
{{ link(true, "setup", "Configuration and versions") }}
</ul>
</nav>

{% if results %}
<section id="results">
<h2>Accuracy</h2>
<p class="how"><b>How to read this.</b> {{ split | capitalize }} accuracy in percent. <b>overall</b> is the
plain mean over clients; <b>worst-50</b> and <b>worst-25</b> are the means of the lowest half and the lowest
quarter of the clients, so they show who is left behind. A task's column pools the examples of that task from
all clients.
{% if several %}
Small numbers are sample standard deviations over seeds.
{% endif %}
{% if results.rows | length > 1 %}
The best value of a column is marked.
{% endif %}
</p>
{{ grid(results) }}
</section>
{% endif %}

{% if differences %}
<section id="differences">
<h2>Paired differences to {{ reference }}</h2>
<p class="how"><b>How to read this.</b> Every method of a seed sees the same clients with the same examples,
so the difference is taken seed by seed (method minus {{ reference }}, in percentage points) and then
averaged. Below 0: the method does worse than {{ reference }}.
{% if several %}
A difference that is small against its standard deviation says little. Point at a cell for the single seeds.
{% endif %}
</p>
{{ grid(differences) }}
</section>
{% endif %}

{% if outside %}
<section id="outside">
<h2>Queries whose owner is hidden</h2>
<p class="how"><b>How to read this.</b> All clients' test examples, in percent. <b>system</b>: nobody knows
whose a query is; a router chooses the client that answers, or, for methods without one, all clients vote.
<b>average</b>: the owner is known and answers. <b>routing</b>: the share of the queries that the router sends
to their owner. A good router makes system and average agree.
{% if outside.columns | length > 5 %}
The differences are taken seed by seed to {{ reference }}, in percentage points.
{% endif %}
</p>
{{ grid(outside) }}
{{ picture("outside_accuracies", "System, average and routing accuracy per method") }}
{% if "monitor_curves" in pictures %}
<p class="how"><b>The monitor of EM.</b> J is the mean negative log-probability of owner and label given the
features; EM drives it down. Purity says whether a learned component is a true one: it should leave the dotted
line, which is what guessing the larger component gives. Bands reach from the lowest to the highest seed.</p>
{{ picture("monitor_curves", "J and purity per round") }}
{% endif %}
</section>
{% endif %}

{% if has_local %}
<section id="negative">
<h2>Negative transfer</h2>
<p class="how"><b>How to read this.</b> A client loses by taking part if it ends below what it reaches alone
(<code>local_only</code>, same clients, same examples). Few such clients and a positive mean difference are
good.</p>
{% if negative %}
{{ grid(negative) }}
{% else %}
<p>No other method shares its clients with local_only.</p>
{% endif %}
</section>
{% endif %}

{% if n_incomplete %}
<section id="incomplete">
<h2>Incomplete runs</h2>
<p class="how">These runs did not finish. They are in no mean and in no difference. <code>fedprism
resume</code> with the directory goes on where they stopped.</p>
{{ grid(incomplete) }}
</section>
{% endif %}

{% if "learning_curves" in pictures %}
<section id="curves">
<h2>Learning curves</h2>
<p class="how"><b>How to read this.</b> Validation accuracy, mean over clients, after every round; the number
is the last value.
{% if several %}
Bands are one standard deviation over seeds to either side.
{% endif %}
A dotted line belongs to a method that is evaluated once. Validation data are not the test data of the table
above.</p>
{{ picture("learning_curves", "Validation accuracy per round and method") }}
{% if "learning_curves_examples" in pictures %}
<details><summary>The same over training examples instead of rounds</summary>
<p class="how">Methods do different amounts of work in a round; this view compares them at equal work.</p>
{{ picture("learning_curves_examples", "Validation accuracy over training examples and method") }}
</details>
{% endif %}
</section>
{% endif %}

{% if client_tables %}
<section id="clients">
<h2>Accuracy per client</h2>
<p class="how"><b>How to read this.</b> A dot is a client's test accuracy; the dashed line is the mean.
{% if differences %}
Clients stand in the same order in all panels, sorted by {{ reference }}, whose values are the grey steps. A
dot under the grey line is a client that this method serves worse than {{ reference }} does.
{% endif %}
</p>
{{ picture("client_accuracies", "Test accuracy of every client, one panel per method") }}
{% for item in client_tables %}
<details><summary>All values, {{ item.title }}</summary>
{{ grid(item.table) }}
</details>
{% endfor %}
</section>
{% endif %}

{% if mixture %}
<section id="mixtures">
<h2>Estimated against true mixtures</h2>
<p class="how"><b>How to read this.</b> The server never sees what a client's data consist of; it infers each
client's shares of the tasks from the weights that extraction gives its uploads. A dot on the line is exact,
and so is a slope of 1. There is a <b>structural limit</b>: the weights of one task over all clients add up to
the same total for every task, so a federation whose tasks are not balanced cannot be estimated exactly,
however good the extraction. "Best feasible" is the smallest error that this limit leaves; judge the measured
error against it, not against 0.</p>
{{ grid(mixture) }}
{{ picture("mixture_scatter", "Estimated against true share of each task in each client") }}
{{ picture("mixture_heatmaps", "True and estimated mixtures side by side, clients by tasks") }}
</section>
{% endif %}

{% if "public_losses" in pictures %}
<section id="losses">
<h2>Table of public losses</h2>
<p class="how"><b>How to read this.</b> Every recovered expert is scored on every task's public set. If
extraction works, each expert is the best one on its own task, so that the orange frames run down the
diagonal. The dot marks the task on which an expert's loss is smallest; tasks differ in difficulty, so an easy
task can attract dots.
{% if several %}
Mean over seeds.
{% endif %}
</p>
{{ picture("public_losses", "Public loss of each expert on each task") }}
</section>
{% endif %}

{% if hulls %}
<section id="hulls">
<h2>Where the experts lie</h2>
<p class="how"><b>How to read this.</b> These runs let experts leave the convex hull of the clients' uploads:
several candidates were fitted per task, and the one with the least loss on public rows held out for that was
taken, in the round reported. <b>convex</b>: inside the hull, weights ≥ 0 with sum 1. <b>affine</b> t²:
weights with sum 1 that may be negative, held near the uploads' mean by a prior of that variance; a large
number hardly holds. <b>posterior</b> t², v²: the better of these two, moved by the public rows in every
direction, under a prior of variance v² in units of the uploads' variance.</p>
{{ grid(hulls) }}
</section>
{% endif %}

{% if "expert_usage" in pictures %}
<section id="usage">
<h2>Mean expert usage per task and layer</h2>
<p class="how"><b>How to read this.</b> A panel holds the test examples of one task. Rows are the adapted
projections from the first layer to the last, columns the experts, and a cell is the mean probability that the
router gives the expert. The task's own expert is framed; evenly pale rows mean that the router does not tell
the experts apart there.
{% if several %}
Mean over seeds.
{% endif %}
</p>
{{ picture("expert_usage", "Mean expert usage by task, projection and expert") }}
</section>
{% endif %}

{% if geometry %}
<section id="geometry">
<h2>Geometry</h2>
<p class="how"><b>How to read this.</b> One <b>expert</b> per task was trained on that task's rows of all
clients, and one <b>adapter</b> per client on the client's own rows, all from the same start. The question is
whether a client whose data mix the tasks ends at the same mix of the experts. <b>Pure</b> clients hold one
task, <b>edge</b> clients several, <b>interior</b> clients all.
{% if geometry.source %}
The runs are those of {{ geometry.source }}.
{% endif %}
</p>
{% if "geometry_plane" in pictures %}
<p class="how">A panel is one layer, seen in the plane of its three experts, the corners of the triangle. A
marker is a client's adapter, its cross the place where the client's mixture of tasks would put it; the
shorter the line between them, the better the mixture explains the adapter. What an adapter has outside this
plane is not in the picture; it is in the residuals.
{% if geometry.several %}
Mean over seeds.
{% endif %}
</p>
{{ picture("geometry_plane", "Adapters and mixtures in the plane of the experts, one panel per layer") }}
{% endif %}
<p class="how">A <b>residual</b> is the distance from an adapter to a weighted mean of the experts, in units
of the largest distance between two experts; bars are medians over clients and layers, and 0 would be a
perfect fit. The affine and the hull fit choose the best weights for each adapter, so no other bar can be
lower: the hull fit takes shares, the affine fit also negative weights. The true mixture should come close to
them, and stay below the two controls: equal weights, and the mixture with its shares moved on to other
tasks.</p>
{{ picture("geometry_residuals", "Residuals of five fits, ours and published") }}
<p class="how">The weights of the hull fit against the tasks' true shares in the client's data: dots on the
diagonal are exact. For tasks that a client lacks the weight should be near 0.</p>
{{ picture("geometry_coordinates", "Weights of the hull fit against true shares") }}
<p class="how">Left: validation cross-entropy of the experts under fixed weights and under a router that the
client trained; lower is better. Right: a router is trained towards equal use of the experts or towards the
client's mixture, and the <b>mismatch</b> is how far its mean use ends from that mixture: from 0 (equal) to 2
(nothing in common).</p>
{{ picture("geometry_routing", "Cross-entropy by weights, and usage mismatch by target") }}
<p class="how">All numbers beside the published ones; small ones are standard deviations over seeds.
{% if geometry.several %}
Point at a cell for the single seeds.
{% endif %}
Backbone, data and steps may differ from the published setting, so compare orders rather than levels; whether
each seed keeps the orders that the paper reports stands below.</p>
{{ grid(geometry.table) }}
{{ grid(geometry.orders) }}
</section>
{% endif %}

{% if costs %}
<section id="costs">
<h2>Communication and time</h2>
<p class="how"><b>How to read this.</b> KiB are what one client sends and receives in one round, on average;
the total is over all clients and rounds of a run. Training examples count every example each time it is used,
all clients together; public examples are the server's. Seconds are wall time on the machine of the run and
compare only within it.</p>
{{ grid(costs) }}
</section>
{% endif %}

{% if published %}
<section id="published">
<h2>Published values beside ours</h2>
<p class="how"><b>How to read this.</b> {{ published.title }}: ours, then the published value, in percent.
{% if published.level %}
The published column is {{ published.level }}, the level of this experiment; values are overall accuracies.
{% endif %}
Backbone, data size and number of rounds may differ from the published setting, so compare the order of the
methods and the differences rather than the levels.</p>
{% if published.table %}
{{ grid(published.table) }}
{% else %}
<p>No column of this table fits the experiment.</p>
{% endif %}
</section>
{% endif %}

{% if federations %}
<section id="federation">
<h2>The federation</h2>
{% for item in federations %}
<h3>Seed {{ item.seeds | join(", ") }}</h3>
<p>{{ item.clients }} clients{{ item.sizes }}.
{% if federations | length > 1 %}
Used by {{ item.methods | join(", ") }}.
{% endif %}
<span class="small">Fingerprint <code>{{ item.fingerprint }}</code></span></p>
{% if item.notes %}
<ul>{% for note in item.notes %}<li>{{ note }}</li>{% endfor %}</ul>
{% endif %}
<details><summary>Training examples per client and task</summary>
{{ grid(item.counts) }}
</details>
{% endfor %}
{% if dispersions %}
<h3>Relative covariance dispersion</h3>
<p class="how"><b>How to read this.</b> For linear heads under squared loss, a client's optimum lies within ρ
times the diameter of the task optima of their barycentre under its mixture; where ρ is large, nothing
guarantees that clients are such barycentres, though they may be. ρ is <b>gap</b>, the largest spectral norm
of a difference between two tasks' second moments of the features, over <b>floor</b>, the smallest eigenvalue
of any of them; a task with fewer training rows than dimensions makes it infinite. <b>Relative gap</b> is gap
over the largest eigenvalue of the mean second moment: 0 if all tasks agree, at most the number of tasks.
<b>Effective rank</b> is the mean's trace over that eigenvalue; all is taken on the dimensions that the
features span.</p>
{{ grid(dispersions) }}
{% endif %}
</section>
{% endif %}

<section id="setup">
<h2>Configuration and versions</h2>
{% if notes %}
<details><summary>Notes of the runs</summary>
<ul>{% for label, seed, note in notes %}<li>{{ label }}, seed {{ seed }}: {{ note }}</li>{% endfor %}</ul>
</details>
{% endif %}
{% if config %}
<details><summary>Configuration</summary><pre>{{ config }}</pre></details>
{% endif %}
{% if model %}
<details><summary>Model</summary><pre>{{ model }}</pre></details>
{% endif %}
{% if versions %}
<details><summary>Versions</summary>{{ grid(versions) }}</details>
{% endif %}
</section>
</body>
</html>
"""
