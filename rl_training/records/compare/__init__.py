"""The comparison of runs: one self-contained HTML page from their records (rl-training report RUN RUN …).

members.py, groups.py             runs, and groups of those that were trained alike
lineage.py, since_branching.py    which runs branched off from which, and their changes of entropy since then
equal_reward.py, final.py         entropy at equal reward, and final figures, with their errors
sentences.py, path_chart.py       both in words, and as a chart
overlays.py                       the other charts
page.py                           the page
"""
