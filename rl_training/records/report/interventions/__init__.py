"""What interventions would do: effects.py reads it, section.py says it, plane.py draws it, branches.py tries it."""
