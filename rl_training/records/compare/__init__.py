"""The comparison of runs: one self-contained HTML page from their records (rl-training report RUN RUN …).

groups.py                         runs that were trained alike
equal_reward.py, final.py         entropy at equal reward, and final figures, with their errors
sentences.py, path_chart.py       both in words, and as a chart
overlays.py                       the other charts
page.py                           the page
"""
