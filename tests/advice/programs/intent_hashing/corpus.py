EXAMPLES = [
    ("turn the lights on in the kitchen", 0),
    ("switch off every lamp", 0),
    ("play some quiet jazz", 1),
    ("what is on the radio", 1),
    ("will it rain tomorrow", 2),
    ("how cold is it outside", 2),
    ("set the lamp to blue", 0),
    ("next song please", 1),
]
