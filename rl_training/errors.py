"""The one error that is the user's: a command ends with its line alone, and with the traceback of any other."""


class UserError(ValueError):
    """Something that was asked for, or a file or library that is there, makes no sense. The text names it and the fix.

    Whatever else is raised is a mistake of the program, and keeps its traceback.
    """
