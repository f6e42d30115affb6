"""The HTML of the report: one style sheet and one template. Nothing in it is loaded from elsewhere.

`reports.write_report` fills the template; every value is escaped there.
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
html { scroll-behavior: smooth; }
body { margin: 0 auto; padding: 2rem 1.25rem 5rem; max-width: 62rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.3rem; margin: 3rem 0 .6rem; padding-top: .9rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.02rem; margin: 1.6rem 0 .4rem; }
p, ul { margin: .5rem 0; max-width: 46rem; }
a { color: var(--link); }
.facts { color: var(--soft); margin-top: 0; }
.lead { font-size: 1.08rem; }
nav { background: var(--band); border-radius: 8px; padding: .8rem 1.1rem; margin: 1.4rem 0; }
nav ul { list-style: none; margin: 0; padding: 0; max-width: none; columns: 3 14rem; column-gap: 1.5rem; }
nav li { padding: .1rem 0; break-inside: avoid; }
.warn { background: var(--warn); border-left: 5px solid var(--warn-line); border-radius: 4px; padding: .6rem 1rem;
  margin: 1rem 0; }
.warn p { max-width: none; }
.how { color: var(--soft); font-size: .94rem; }
.how b { color: var(--ink); }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); vertical-align: bottom; }
th.left, td.left { text-align: left; }
td.left { font-weight: 600; }
td.text { text-align: left; white-space: normal; font-weight: 400; }
tbody tr:hover { background: var(--band); }
.part { border-left: 1px solid var(--line); }
td.best { background: var(--best); font-weight: 700; }
td.up { color: var(--up); } td.down { color: var(--down); }
.small { font-size: .82rem; color: var(--soft); font-weight: 400; }
figure { margin: 1rem 0; padding: .7rem; background: #ffffff; border: 1px solid var(--line); border-radius: 8px;
  max-width: 832px; }
figure img { display: block; width: 100%; height: auto; }
figcaption { color: #444b55; font-size: .86rem; padding: .3rem .2rem 0; }
details { margin: .8rem 0; border: 1px solid var(--line); border-radius: 8px; padding: .5rem .9rem; }
summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; background: var(--band); padding: .8rem; border-radius: 6px; font-size: .82rem; line-height: 1.45; }
code { font-size: .9em; overflow-wrap: anywhere; }
@media print { body { max-width: none; } details { border: 0; } h2 { break-after: avoid; } figure { break-inside: avoid; } }
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
{% macro picture(kind, alt) %}
{% for item in pictures.get(kind, []) %}
<figure>
<img src="{{ item.source }}" alt="{{ alt }}{% if item.label %} ({{ item.label }}){% endif %}">
{% if item.label %}<figcaption>{{ item.label }}</figcaption>{% endif %}
</figure>
{% endfor %}
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
{% if incomplete %}
<div class="warn"><p><b>{{ incomplete | length }} incomplete run{{ "s" if incomplete | length != 1 }}</b>, not in the
means below: <a href="#incomplete">how far they got</a>.</p></div>
{% endif %}

<div class="lead">
{% for line in headline %}<p>{{ line }}</p>{% endfor %}
</div>

<nav aria-label="Contents">
<ul>
{% if results %}<li><a href="#results">Accuracy</a></li>{% endif %}
{% if differences %}<li><a href="#differences">Paired differences</a></li>{% endif %}
{% if has_local %}<li><a href="#negative">Negative transfer</a></li>{% endif %}
{% if incomplete %}<li><a href="#incomplete">Incomplete runs</a></li>{% endif %}
{% if pictures.learning_curves %}<li><a href="#curves">Learning curves</a></li>{% endif %}
{% if client_tables %}<li><a href="#clients">Accuracy per client</a></li>{% endif %}
{% if mixture %}<li><a href="#mixtures">Estimated mixtures</a></li>{% endif %}
{% if pictures.public_losses %}<li><a href="#losses">Table of public losses</a></li>{% endif %}
{% if pictures.expert_usage %}<li><a href="#usage">Expert usage</a></li>{% endif %}
{% if traffic %}<li><a href="#costs">Communication and time</a></li>{% endif %}
{% if published %}<li><a href="#published">Published values</a></li>{% endif %}
{% if federations %}<li><a href="#federation">The federation</a></li>{% endif %}
<li><a href="#setup">Configuration and versions</a></li>
</ul>
</nav>

{% if results %}
<section id="results">
<h2>Accuracy</h2>
<p class="how"><b>How to read this.</b> {{ results.split | capitalize }} accuracy in percent. <b>overall</b> is the plain
mean over clients; <b>worst-50</b> and <b>worst-25</b> are the means of the lowest half and the lowest quarter of the
clients, so they show who is left behind. A task's column pools the examples of that task from all clients.
{% if several %}Values are means ± sample standard deviation over seeds. {% endif %}
{% if results.rows | length > 1 %}The best value of a column is marked.{% endif %}</p>
<div class="scroll"><table>
<thead><tr><th class="left">method</th>
{% for title in results.columns %}<th{% if loop.index0 == results.n_scores %} class="part"{% endif %}>{{ title }}</th>{% endfor %}
{% if several %}<th class="part">seeds</th>{% endif %}</tr></thead>
<tbody>
{% for row in results.rows %}
<tr><td class="left">{{ row.label }}</td>
{% for cell in row.cells %}<td class="{{ 'part ' if loop.index0 == results.n_scores }}{{ 'best' if cell.best }}">{{ cell.text }}</td>{% endfor %}
{% if several %}<td class="part">{{ row.seeds }}</td>{% endif %}</tr>
{% endfor %}
</tbody></table></div>
</section>
{% endif %}

{% if differences %}
<section id="differences">
<h2>Paired differences to {{ differences.reference }}</h2>
<p class="how"><b>How to read this.</b> Every method of a seed sees the same clients with the same examples, so the
difference is taken seed by seed (method minus {{ differences.reference }}, in percentage points) and then averaged. Below
0: the method does worse than {{ differences.reference }}. A difference much smaller than its ± says little.
{% if several %}Point at a cell for the single seeds.{% endif %}</p>
<div class="scroll"><table>
<thead><tr><th class="left">method</th>
{% for title in differences.columns %}<th{% if loop.index0 == differences.n_scores %} class="part"{% endif %}>{{ title }}</th>{% endfor %}
<th class="part">paired seeds</th></tr></thead>
<tbody>
{% for row in differences.rows %}
<tr><td class="left">{{ row.label }}</td>
{% for cell in row.cells %}<td class="{{ 'part ' if loop.index0 == differences.n_scores }}{{ cell.tone }}"{% if cell.each %} title="{{ cell.each }}"{% endif %}>{{ cell.text }}</td>{% endfor %}
<td class="part">{{ row.seeds | join(", ") or "none" }}{% if row.unpaired %} <span class="small">(without partner: {{ row.unpaired | join(", ") }})</span>{% endif %}</td></tr>
{% endfor %}
</tbody></table></div>
</section>
{% endif %}

{% if has_local %}
<section id="negative">
<h2>Negative transfer</h2>
<p class="how"><b>How to read this.</b> A client loses by taking part if it ends below what it reaches alone
(<code>local_only</code>, same clients, same examples). Few such clients and a positive mean difference are good.</p>
{% if negative %}
<div class="scroll"><table>
<thead><tr><th class="left">method</th><th>clients below local_only</th><th>per seed</th><th>mean difference, points</th></tr></thead>
<tbody>
{% for row in negative %}
<tr><td class="left">{{ row.label }}</td><td>{{ row.below }} of {{ row.n }}</td><td>{{ row.each }}</td><td>{{ row.difference }}</td></tr>
{% endfor %}
</tbody></table></div>
{% else %}<p>No other method shares its clients with local_only.</p>{% endif %}
</section>
{% endif %}

{% if incomplete %}
<section id="incomplete">
<h2>Incomplete runs</h2>
<p class="how">These runs did not finish. They are in no mean and in no difference. <code>fedprism resume</code> with
the run's directory continues one where it stopped.</p>
<div class="scroll"><table>
<thead><tr><th class="left">method</th><th>seed</th><th>state</th><th>last validation accuracy</th></tr></thead>
<tbody>
{% for run in incomplete %}
<tr><td class="left">{{ run.label }}</td><td>{{ run.seed }}</td><td>{{ run.state }}</td><td>{{ run.validation }}</td></tr>
{% endfor %}
</tbody></table></div>
</section>
{% endif %}

{% if pictures.learning_curves %}
<section id="curves">
<h2>Learning curves</h2>
<p class="how"><b>How to read this.</b> Validation accuracy, mean over clients, after every round; the number is the last
value. {% if several %}Bands are ± one standard deviation over seeds. {% endif %}A dotted line belongs to a method that is
evaluated once. Validation data are not the test data of the table above.</p>
{{ picture("learning_curves", "Validation accuracy per round and method") }}
{% if pictures.learning_curves_examples %}
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
{% if methods | length > 1 %}Clients stand in the same order in all panels, sorted by {{ reference }}, whose values are the
grey steps. A dot under the grey line is a client that this method serves worse than {{ reference }} does.{% endif %}</p>
{{ picture("client_accuracies", "Test accuracy of every client, one panel per method") }}
{% for table in client_tables %}
<details><summary>All values, seed {{ table.seed }}</summary>
<div class="scroll"><table>
<thead><tr><th>client</th>{% for label in table.labels %}<th>{{ label }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}
<tr><td>{{ row.client }}</td>{% for cell in row.cells %}<td{% if cell.best %} class="best"{% endif %}>{{ cell.text }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
</details>
{% endfor %}
</section>
{% endif %}

{% if mixture %}
<section id="mixtures">
<h2>Estimated against true mixtures</h2>
<p class="how"><b>How to read this.</b> The server never sees what a client's data consist of; it infers each client's
shares of the tasks from the weights that extraction gives its uploads. A dot on the line is exact. There is a
<b>structural limit</b>: the weights of one task over all clients must add up to the same total for every task, so a
federation with unequal tasks cannot be estimated exactly by any method of this kind. The column "best feasible" is the
smallest error that the limit leaves; the measured error should be judged against it, not against 0.</p>
<div class="scroll"><table>
<thead><tr><th class="left">method</th><th>mean absolute error, points</th><th>best feasible</th><th>against realised shares</th>
<th>slope (exact: 1)</th><th>one-task clients recognised, %</th></tr></thead>
<tbody>
{% for row in mixture %}
<tr><td class="left">{{ row.label }}</td><td>{{ row.mae }}</td><td>{{ row.feasible }}</td><td>{{ row.realised }}</td>
<td>{{ row.slope }}</td><td>{{ row.pure }}</td></tr>
{% endfor %}
</tbody></table></div>
{{ picture("mixture_scatter", "Estimated against true share of each task in each client") }}
{{ picture("mixture_heatmaps", "True and estimated mixtures side by side, clients by tasks") }}
</section>
{% endif %}

{% if pictures.public_losses %}
<section id="losses">
<h2>Table of public losses</h2>
<p class="how"><b>How to read this.</b> Every recovered expert is scored on every task's public set. If extraction works,
each expert is the best one on its own task, so that the orange frames run down the diagonal. The dot marks the task on
which an expert's loss is smallest; tasks differ in difficulty, so an easy task can attract dots.
{% if several %}Mean over seeds.{% endif %}</p>
{{ picture("public_losses", "Public loss of each expert on each task") }}
</section>
{% endif %}

{% if pictures.expert_usage %}
<section id="usage">
<h2>Mean expert usage per task and layer</h2>
<p class="how"><b>How to read this.</b> A panel holds the test examples of one task. Rows are the adapted projections from
the first layer to the last, columns the experts, and a cell is the mean probability that the router gives the expert. The
task's own expert is framed; evenly grey rows mean that the router does not tell the experts apart there.
{% if several %}Mean over seeds.{% endif %}</p>
{{ picture("expert_usage", "Mean expert usage by task, projection and expert") }}
</section>
{% endif %}

{% if traffic %}
<section id="costs">
<h2>Communication and time</h2>
<p class="how"><b>How to read this.</b> KiB are what one client sends and receives in one round, on average; the total is
over all clients and rounds of a run. Training examples count every example each time it is used, all clients together;
public examples are the server's. Seconds are wall time on the machine of the run and compare only within it.</p>
<div class="scroll"><table>
<thead><tr><th class="left">method</th><th>KiB up</th><th>KiB down</th><th>total MiB</th><th class="part">rounds</th><th>local epochs</th>
<th>training examples</th><th>public examples</th><th class="part">seconds</th></tr></thead>
<tbody>
{% for row in traffic %}
<tr><td class="left">{{ row.label }}</td><td>{{ row.up }}</td><td>{{ row.down }}</td><td>{{ row.total }}</td><td class="part">{{ row.rounds }}</td>
<td>{{ row.epochs }}</td><td>{{ row.examples }}</td><td>{{ row.public }}</td><td class="part">{{ row.seconds }}</td></tr>
{% endfor %}
</tbody></table></div>
</section>
{% endif %}

{% if published %}
<section id="published">
<h2>Published values beside ours</h2>
<p class="how"><b>How to read this.</b> {{ published.title }}: first ours, then the published value, in percent.
{% if published.level %}The published column shown is {{ published.level }}, the level of this experiment. {% endif %}Backbone,
data size and number of rounds may differ from the published setting, so compare the order of the methods and the
differences rather than the levels.</p>
{% if published.columns %}
<div class="scroll"><table>
<thead><tr><th class="left">method</th><th class="left">value</th>{% for c in published.columns %}<th class="part">{{ c }}<br>ours</th><th>published</th>{% endfor %}</tr></thead>
<tbody>
{% for row in published.rows %}
<tr><td class="left">{{ row.label }}</td><td class="text">{{ row.kind }}</td>{% for cell in row.cells %}<td class="part">{{ cell.ours }}</td><td>{{ cell.theirs }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% else %}<p>No column of this table fits the experiment.</p>{% endif %}
</section>
{% endif %}

{% if federations %}
<section id="federation">
<h2>The federation</h2>
{% for f in federations %}
<h3>Seed {{ f.seeds | join(", ") }} <span class="small">fingerprint <code>{{ f.fingerprint }}</code></span></h3>
<p>{{ f.clients }} clients{% if f.sizes %}, {{ "%d to %d training examples each (mean %.0f)" | format(f.sizes[0], f.sizes[2], f.sizes[1]) }}{% endif %}.
{% if federations | length > 1 %}Used by {{ f.methods | join(", ") }}.{% endif %}</p>
{% if f.notes %}<ul>{% for note in f.notes %}<li>{{ note }}</li>{% endfor %}</ul>{% endif %}
{% if f.counts %}
<details><summary>Training examples per client and task</summary>
<div class="scroll"><table>
<thead><tr><th>client</th>{% for task in f.tasks %}<th>{{ task }}</th>{% endfor %}<th class="part">all</th></tr></thead>
<tbody>
{% for row in f.counts %}<tr><td>{{ row.client }}</td>{% for cell in row.cells %}<td>{{ cell or "·" }}</td>{% endfor %}<td class="part">{{ row.n }}</td></tr>
{% endfor %}
<tr><td class="left">all</td>{% for total in f.totals %}<td>{{ total }}</td>{% endfor %}<td class="part">{{ f.totals | sum }}</td></tr>
{% if f.public %}<tr><td class="left">public</td>{% for task in f.tasks %}<td>{{ f.public.get(task, "·") }}</td>{% endfor %}<td class="part"></td></tr>{% endif %}
</tbody></table></div>
</details>
{% endif %}
{% endfor %}
</section>
{% endif %}

<section id="setup">
<h2>Configuration and versions</h2>
{% if notes %}
<details><summary>Notes of the runs</summary><ul>
{% for note in notes %}<li>{{ note.label }}, seed {{ note.seed }}: {{ note.text }}</li>{% endfor %}
</ul></details>
{% endif %}
{% if config %}<details><summary>Configuration</summary><pre>{{ config }}</pre></details>{% endif %}
{% if model %}<details><summary>Model</summary><pre>{{ model }}</pre></details>{% endif %}
{% if versions %}
<details><summary>Versions</summary>
<div class="scroll"><table><tbody>
{% for row in versions %}<tr><td class="left">{{ row.name }}</td><td class="text">{{ row.value }}</td><td class="text">{{ "differs between runs" if row.differs }}</td></tr>{% endfor %}
</tbody></table></div></details>
{% endif %}
</section>
</body>
</html>
"""
