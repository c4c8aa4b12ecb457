"""Answers in sentences: composed right answers are paid; wrong, doubtful and ambiguous answers never are."""

import itertools
import time

from grpo_rewards.math.comparison import compare
from grpo_rewards.math.numbers import answer_number
from grpo_rewards.math.prose import stated_quantity

# Forms of a quantity; {} is the number.
QUANTITIES = """
    {} | {} apples | {} dollars | ${} | ${}.00 | {} miles | {} km/h | {}% | {} percent | {} square feet | {} cm² |
    €{} | £{} | {} pounds of flour | {} more dollars | {} years old | {} hours a week | {} people | {} dozen eggs |
    {} USD | USD {} | **{}** | **{} apples** | **${}** | __{}__ pens | \\boxed{{{}}} | \\boxed{{{} dollars}} |
    $\\boxed{{{}}}$ | \\({}\\) | \\({}\\) miles | $\\boxed{{{}\\text{{ km}}}}$ | *{}* | `{}` | "{}" | ({}) marbles |
    \\${} | \\text{{{}}} | **\\({}\\)** | {} kg | {} pages per day | {} minutes | US${} | {} different books | {}¢ |
    {}°C | {} m | {} liters of water | only {} coins | exactly {} stickers | a total of {} dollars |
    another {} cards | {}-foot boards | ${} per hour | {} quarters | {} tables | {} seconds | $\\text{{\\${}}}$
"""
RIGHT = """
    She has {q} left. | So, they need {q} in all. | the total comes to {q}! | Janet makes {q} every day |
    Therefore, John earned {q} in total. | The answer is that Mary spent {q}. | It takes him {q} to finish the job. |
    He would pay {q}. | It adds up to {q}. | In total, the class collected {q}. | As a result, Tom still owes {q}. |
    The whole trip is {q} long. | Her profit is equal to {q}. | We get {q}. |
    Emily's brother ate {q} during the weekend. | You can buy {q}. | There are {q} in the basket now. | {q} remain. |
    {q} is the final amount | Finally, {q} is what Billy paid. | Final answer: she saved {q} | Answer: Sally ran {q} |
    The distance between the towns amounts to {q}. | Their combined weight is {q}. |
    That leaves her with {q} after lunch. | The price of the bike was {q} before the sale. | **She must read {q}.** |
    Each child gets {q}. | I get {q} for the total. | It costs {q}, so that is the answer. |
    The train travels {q} along the river. | He was given {q} by his aunt. | The number of apples is {q}. |
    The average is {q}. | Mr. Smith's students planted {q}. | It will last {q}. |
    They have {q} remaining in their farmers' market stall. | A group of friends shared {q} equally. |
    The remainder is {q}. | The cost comes out to {q}. | This means the farmer harvested {q}. | The difference is {q}. |
    Natalia sold {q} altogether in April and May. | She needs to save {q} to buy the wallet. | So x is {q}. |
    Ken's box weighed {q}. | Her weekly income increased by {q}. | Both of them drank {q}. |
    In conclusion, Carla downloads {q}. | The total number of clips = {q} |
    Thus, Eliza's earnings for the week are {q}. |
    The company makes a profit of {q}. | Total cost: {q} | The area of the garden is {q}. |
    So the dogs will eat {q} per month. | There were {q} of them at the party. | Max has {q}.
"""
VALUES = (7, 18, 35, 240, 1450)


def listed(text: str) -> list[str]:
    return [" ".join(item.split()) for item in text.split("|")]


def composed_right() -> list[tuple[str, int]]:
    """Return sentences and their values: each frame and each quantity in many combinations."""
    pairs = list(itertools.product(listed(RIGHT), listed(QUANTITIES)))[::3]
    cells = zip(pairs, itertools.cycle(VALUES), strict=False)
    return [(frame.replace("{q}", quantity.format(value)), value) for (frame, quantity), value in cells]


def verdict(text: str, gold: int) -> str:
    return compare(str(gold), text)


def test_nearly_all_composed_right_answers_are_paid():
    answers = composed_right()
    missed = [text for text, value in answers if verdict(text, value) not in ("exact", "equal")]
    # A text that is paid states one number, so that only those missed could be another's.
    assert [text for text, value in answers if text in missed and verdict(text, value + 1) != "wrong"] == []
    assert len(answers) > 900
    # "18!" is a factorial, and a plural is no subject of "is".
    assert [text for text in missed if not text.endswith(("!", " is the final amount"))] == []
    assert len(missed) <= 7, missed


# Sentences that state none of their numbers. {q} is a number, with or without a unit.
DOUBTFUL = """
    It is around {q}. | Roughly {q} remain. | It's nearly {q}. | She almost has {q}. | Maybe she has {q}. |
    Perhaps the answer is {q}. | I believe that Tom has {q}. | My estimate is {q}. | She might have {q}. |
    He may owe {q}. | It could be {q}. | It should be {q}. | It seems to be {q}. | The answer appears to be {q}. |
    It is likely {q}. | Possibly {q} | She has some {q}. | She has close to {q}. | She has like {q}. |
    It is in the vicinity of {q}. | She has {q} or so. | She has {q}, give or take. | She has {q} I think |
    It isn't {q}. | She does not have {q}. | She never had {q}. | Not {q} but fewer. | The answer cannot be {q}. |
    The answer can’t be {q}. | {q} is incorrect. | {q} is wrong. | Nobody has {q}. | Neither has {q}. |
    None of them has {q}. | She failed to earn {q}. | It is anything but {q}. | It is far from {q}. |
    It is false that she has {q}. | The total is greater than {q}. | She has at most {q}. | It costs under {q}. |
    It is above {q}. | It is below {q}. | It exceeds {q}. | It comes to up to {q}. | It goes up to {q}. |
    A minimum of {q} is needed. | She needs a maximum of {q}. | She has upwards of {q}. | She has in excess of {q}. |
    She has {q} or less. | She has {q} and up. | She has {q} fewer than him. | She has as many as {q}. |
    It took {q} minimum. | It's {q} max. | It is just over {q}. | It's a little under {q}. | It is short of {q}. |
    It is shy of {q}. | It is within {q}. | She has beyond {q}. | It is past {q}. | She has well over a total of {q}. |
    How many? {q} | If she has {q}, she wins. | Suppose she has {q}. | Unless she has {q}, no. | Let her have {q}. |
    Assume {q}. | She would have had {q}. | Either {q} is right. | She has {q}, or I am mistaken. |
    {q} or another amount | Wait, {q}. | She has {q} plus tax. | She has {q} minus tax. | She has twice {q}. |
    She has double {q}. | She has a third of {q}. | It is the square root of {q}. | It is a multiple of {q}. |
    The price of {q} is high. | On the first day she has {q}. | Half of them have {q}. | Probably: {q} |
    Her best guess = {q} | Step {q}. | See question {q}. | It is divided by {q}. | She multiplied by {q}. |
    Her sum times {q}. | The power of {q} | She rounded to {q}. | It is expected to be {q}. | They say {q}. |
    Tom claims {q}. | She hopes for {q}. | Hopefully {q} | {q}-ish, all told | I'm pretty sure it's {q}. |
    Somewhere near {q} | It ranges to {q}. | It is compared to {q}. | It is limited to {q}. | Basically {q} |
    She has {q} tops. | {q} is too low. | It is a good {q}. | There used to be {q}. | It is capped at {q}. |
    It nears {q}. | About **{q}** are left. | She has at least \\boxed{{q}}. | She has more than \\({q}\\). |
    She has approximately **{q}**.
"""
TWO_NUMBERS = """
    After 3 days **she has {q}**. | For 3 days the total = **{q}**. | In two days she has {q}. |
    She has 3 boxes, so {q}. | She had 20 and now {q}. | Either 17 or {q}. | She has between 17 and {q}. |
    From 17 to {q}. | 17 + 2 = {q} is the answer. | So 3 * 6 = {q}. | She has 17, no, {q}. | 17? No, {q}. |
    She has 17 apples and {q}. | First 17 and then {q}. | Tom has {q}, and Ann has 4. | {q} of 30 people |
    {q} out of 30 |
    She has {q} (or 19). | She has {q} - 1 left. | It is 1/2 of {q}. | She has {q} and half. | At 18:00 she has {q}. |
    She has eighteen and {q}. | It took 3 minutes and {q}. | 2 groups of {q} | She has {q}, which is 3 more. |
    Twenty minus {q} | 20 less {q} | She has **17**, **{q}**. | 17, **{q}** are the answers. | **{q}** and 17 |
    In **3** days she has {q}. | She had **17** and ate 5, leaving {q}. | She has $17 and ${q}. |
    \\boxed{17} and {q} are left | She has \\boxed{17}\\boxed{{q}}.
"""
NUMBERS = ("18", "18 apples", "$18", "eighteen")


def test_no_wrong_or_doubtful_answer_is_paid():
    frames = listed(DOUBTFUL) + listed(TWO_NUMBERS)
    texts = [frame.replace("{q}", number) for frame, number in zip(frames, itertools.cycle(NUMBERS), strict=False)]
    assert [text for text in texts if verdict(text, 18) != "wrong" or answer_number(text) is not None] == []


SET_OFF = """
    After 3 days, she has **18** apples. | In 3 days she has \\boxed{18} apples left. |
    He will be **18** when she is 30. | With 4 boxes of 6, the total is **18 dollars**. |
    She sold **18** of the 30 eggs. | Over 5 weeks he saves \\(18\\) dollars. | She has **18** apples after 3 days. |
    She has **18 apples** left after eating 3 of them. | Of 30 students, __18__ walk. |
    For each of the two sisters that makes **$18**. | At 18:30 there are **18** guests. |
    On the third day he ran **18 km**!
"""


def test_a_sentence_of_two_numbers_states_the_one_that_is_set_off():
    assert [text for text in listed(SET_OFF) if answer_number(text) != 18] == []


def test_reading_a_sentence_takes_linear_time():
    pieces = [
        "18 ", "she has 18 and ", "**a ", "\\boxed{", "wait, ", "the ", "of the ", "and ", "__a", "\n", " ", "$", "'",
        "a-",
    ]  # fmt: skip
    start = time.perf_counter()
    for piece in pieces:
        answer_number((piece * 1000)[:990] + " a 18")
        answer_number((piece * 500_000) + " a 18")
    assert time.perf_counter() - start < 2


STATE_18 = """
    There are **18** apples. | In 3 days she has **18** apples. | She has **18** apples after 3 days. |
    She came second with 18 points. | In a second week it has 18. | She has 18 apples/pears. |
    The cost - in euro - is 18. | There, she has **18** apples after 3 days. | They're 18 years old. |
    They've 18 apples. | It's 18. | has 18 apples | have 18 apples | The dogs 18. | Then Ann put up 18 signs. |
    She is running 18 miles. | Cost 18 | Total: 18 | In euro: 18 | It is in sum. 18. | It is the total. 18 |
    A price of 18 is left. | The sum of 18 is left. | The total = the 18 | The price, 18 | Put up 18 signs. |
    She took the bus , 18 remained. | She took the bus¶18 remained. | She has **18** apples with 3 pears. |
    She ate half eggs and **18** apples. | 18 are | 18 dogs eat apples | 18 is the cost | She has 18 A.
"""
STATE_NONE = """
    They are 3 cats and 4 dogs. | She has **18** apples, and 3 pears. | She has **18** apples so 3 are bad. |
    3 and **18** are left. | **3** and **18** are left. | 17 + 1 = **18** apples | **In 3 days she has 18** |
    She has half. | She ate half of the 18 apples. | On the second day she has 18. | 18 | She has eggs. |
    She ate 18 halves. | She has **3** **18** apples. | She has 3 **18** apples. | She has dozens. |
    On her second day she has 18. | In his second week he has 18. | In their second week they have 18. |
    She has 18! apples | She has the 18th apple. | She has 18 apples+pears. | She has - 18 apples. |
    She has 18 - apples. | She has * 18 | buy 18 apples | Give Olaf 10 cars. | Running 18 miles. | Age 18 | Size 18 |
    The old cost, 18 | In xyz: 18 | It is in fig. 18. | She sees the price of the 18 books. |
    This price of 18 is left. | That price of 18 is left. | It is next to 18. | It is off by 18. |
    She has 18 miles = 18 | She has to x 18. | She took the bus 18 remained. | She has **18** apples, with 3 pears. |
    She ate half and **18** apples. | She has 18 odd apples. | She has 18 some. | She has 18 below. | 18 total |
    18 are tall | She left on 18 March. | She left on 18 of March. | One apple is left. |
    She keeps the one that fell. | She keeps one of them. | She keeps another one.
"""


def test_the_number_of_a_sentence_as_it_is_written():
    read = lambda text: stated_quantity(text.replace("¶", "\n"))  # noqa: E731
    assert [text for text in listed(STATE_18) if read(text) != "18"] == []
    assert [text for text in listed(STATE_NONE) if read(text) is not None] == []
    assert read("\x02 She has 18.") is read("\x03 She has 18.") is None
    table = [
        ("She has two hundred and six apples.", "two hundred and six"), ("He owns a hundred cows.", "a hundred"),
        ("It costs two million dollars.", "two million"), ("She has 18 thousand dollars.", "18 thousand"),
        ("The sum is minus 18.", "minus 18"), ("She bought 2 dozen eggs.", "2"),
        ("She has twenty-five.", "twenty five"), ("Twenty apples are left.", "Twenty"),
        ("In total, 18 thousand dollars.", "18 thousand"), ("She ate an hundred eggs.", "an hundred"),
        ("It is negative 18.", "negative 18"), ("She has -18.", "-18"), ("She has the hundred.", "hundred"),
        ("She has $18!", "$18"), ("They give Olaf 10 cars.", "10"), ("She keeps one apple", "one"),
    ]  # fmt: skip
    assert [(text, read(text)) for text, stated in table if read(text) != stated] == []


def test_a_sentence_of_up_to_eight_numbers_is_read():
    for others, stated in ((7, "18"), (8, None)):
        assert stated_quantity("In 3 days " + "then 3 days " * (others - 1) + "there are **18** apples.") == stated


# Pairs: the first sentence states 18 (or another number), the second, which differs in a word or a mark, none.
PAIRS = """
    - She has 18 apples. | -18 - she has. | In all—18 apples. | Tom—18 | The total = 18. | The total != 18. |
    She has 18 apples. | She has 18 * apples. | She has 18 m. | She has 18 x. | She has 18 g left. |
    She has 18 q left. | She has 18. | She has x 18. | She gave a 18. | She gave b 18. | In total, 18 | Tom, 18 |
    In meters: 18 | In banana: 18 | So now, 18 | So Tom, 18 | The cost, 18 | The trick, 18 | The cost is this: 18 |
    Is this: 18 | She has: 18 | Tom: 18 | The red total = 18 | Total = red 18 | They march 18 miles. |
    They left March 18. | 18 marches are left | 18 March is left | 18 of them are left | 18 of March is left |
    In May she has 18. | She may have 18. | Max has 18. | She has max 18. | 18 was his | 18 was banana |
    18 were eaten | 18 were tall | 18 were eating | 18 were a lie | 18 dogs jumped | 18 dogs bark |
    18 apples are left | 18 apples | She put up 18 signs. | Up 18 | She gave away 18 apples. | Away 18 apples. |
    Dad gave Olaf 10 cars. | Dad gave olaf 10 cars. | gave Olaf 10 cars | Dad Olaf 10 cars. | Exactly 18 |
    Exactly 18 nope | Exactly 18 apples | Just 18 banana | It increased by 18. | It is multiplied by 18. |
    He walked to 18 houses. | It is similar to 18. | The total of 18 is left. | The price of 18 is left. |
    A bag of 18 apples is left. | A root of 18 is left. | She has one apple. | She has one. | She ate one apple. |
    She sees one who eats. | Zoë has 18. | Она has 18. | Each second she runs 18 miles. |
    Her second run took 18 minutes. | Second, she has 18. | On its second day she has 18.
"""


def test_a_sentence_states_its_number_and_one_beside_it_does_not():
    stating, others = listed(PAIRS)[::2], listed(PAIRS)[1::2]
    assert [text for text in stating if stated_quantity(text) not in ("18", "10", "one")] == []
    assert [text for text in others if stated_quantity(text) is not None] == []
