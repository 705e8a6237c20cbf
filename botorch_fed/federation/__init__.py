"""What all protocols share.

disclosure    Sees and Price: who reads which message, and what a run costs in privacy
registry      protocols by the names that study files use
"""
