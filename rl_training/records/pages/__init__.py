"""How any page is made: self-contained HTML with charts, of one run, of several, or of a checkpoint analysis.

page.py           a page from a template, and pictures of its charts
templates/        the pages, their style and scripts; charts.yaml has the texts of all charts
charts.py         a chart and its curves as data; drawing.py makes charts, labels.py places texts in them
preview.py        a chart that is there before its scripts have run
environment.py    Jinja's environment of templates
writing.py        how numbers and sentences are written
"""
