"""The one error that is for the user: a command ends with its line alone, and with the traceback of any other."""


class UserError(ValueError):
    """What was asked for cannot be done: a setting, a file, the machine or one's own code stands against it.

    The text names it and the fix, in one line. Whatever else is raised is a mistake of the program.
    """
