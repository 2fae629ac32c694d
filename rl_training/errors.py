"""The one error meant for the user: commands print only its message, but the traceback of any other error."""


class UserError(ValueError):
    """What the user asked for cannot be done, because of a setting, a file, the machine or the user's own code.

    The message names the cause and the fix, in one line. Any other exception is a bug in the program.
    """
