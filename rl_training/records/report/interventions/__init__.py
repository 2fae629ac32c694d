"""What interventions would do: section.py says it, plane.py draws it, branches.py tries it."""
