"""Conversation prompts from our own templates: writing, role-play, explanation, reasoning,
extraction, opinion.
"""

from __future__ import annotations

import random
from collections.abc import Callable

_SCIENCE = (
    "photosynthesis|gravity|plate tectonics|the water cycle|black holes|evolution by natural selection|electric current|"
    "magnetism|the greenhouse effect|vaccines|DNA replication|chemical bonds|acids and bases|entropy|sound waves|"
    "the human heart|the immune system|nuclear fusion|the periodic table|ocean currents|volcanoes|relativity|radioactivity|"
    "mitochondria|enzymes|antibiotic resistance|the carbon cycle|light refraction|semiconductors|stem cells|tides|"
    "the life cycle of stars|hormones|osmosis|friction|Newton's laws of motion|the ozone layer|memory in the brain|"
    "hurricanes|fermentation|batteries|solar panels|wind turbines|earthquakes|the speed of light|bacteria and viruses"
).split("|")  # fmt: skip
_TECH = (
    "recursion|hash tables|relational databases|version control with Git|HTTP and HTTPS|machine learning|neural networks|"
    "public-key encryption|cloud computing|operating systems|compilers|unit testing|APIs|garbage collection|blockchain|"
    "threads and processes|load balancing|caching|search engines|recommendation systems|overfitting|regular expressions|"
    "object-oriented programming|functional programming|sorting algorithms|virtual machines|containers|firewalls|"
    "DNS|big-O notation|decision trees|gradient descent|large language models|computer vision|message queues|debugging"
).split("|")  # fmt: skip
_SOCIETY = (
    "inflation|supply and demand|the French Revolution|the Industrial Revolution|democracy|the Roman Empire|the Silk Road|"
    "human rights|the Renaissance|international trade|monopolies|unemployment|public health care|the printing press|"
    "urban planning|globalization|the United Nations|the gold standard|copyright law|taxation|central banks|federalism|"
    "the Cold War|the history of chess|ancient Egypt|the Vikings|the invention of the wheel|stoicism|utilitarianism|"
    "existentialism|game theory|the placebo effect|cognitive biases|moral relativism|free will|the social contract|"
    "advertising|migration|renewable energy policy|the history of coffee|newspapers|labour unions|insurance|microfinance"
).split("|")  # fmt: skip
_PLACES = (
    "Lisbon|Kyoto|Iceland|Marrakesh|Patagonia|Edinburgh|Vietnam|New Zealand|Istanbul|Cape Town|Rome|the Alps|Mexico City|"
    "Norway|Bali|Prague|Nairobi|Peru|the Scottish Highlands|Vienna|Costa Rica|Seoul|Montreal|Jordan|Croatia|Nepal|a small "
    "fishing village|the countryside|a national park|the desert|a tropical island|an old mountain railway|Barcelona"
).split("|")  # fmt: skip
_THEMES = (
    "a lost letter|a lighthouse keeper|a robot that learns to paint|the last bookshop in town|a talking cat|a time traveller|"
    "two rival bakers|a storm at sea|a forgotten garden|a child who can hear plants|a detective without a memory|the first "
    "colony on Mars|a dragon who is afraid of fire|an unexpected friendship|a broken clock|a night train|a mysterious map|"
    "a village under the snow|a musician who loses her hearing|an honest thief|the end of summer|a stray dog|a haunted "
    "library|a chess game with Death|an island that moves|a grandmother's recipe|a message in a bottle|a city in the clouds|"
    "an old soldier|a dream that comes true|a door that only opens at midnight|a fox and a crow|the sound of rain"
).split("|")  # fmt: skip
_GOODS = (
    "a reusable water bottle|a coffee subscription|a language learning app|noise-cancelling headphones|an electric bicycle|"
    "a cooking class|a gardening kit|a fitness tracker|a board game|a travel backpack|organic soap|a standing desk|"
    "a children's book|a photo editing program|a local farmers' market|an online course on statistics|a tent|a smart lamp|"
    "homemade jam|a second-hand bookshop|a yoga studio|a bakery|a meal planning service|a bird feeder|a podcast microphone"
).split("|")  # fmt: skip
_TASKS = (
    "sleep better|learn a new language|prepare for a job interview|save money|start running|read more books|manage stress|"
    "write a novel|plan a wedding|improve public speaking|grow tomatoes|train a puppy|study for an exam|cook for a family|"
    "organise a small flat|start a small business|make new friends in a new city|reduce screen time|build a bookshelf|"
    "brew good coffee|learn to play the guitar|prepare a presentation|eat healthier|negotiate a salary|fix a flat tyre|"
    "write a CV|lead a team meeting|stop procrastinating|care for houseplants|travel on a budget|protect one's privacy online|"
    "teach a child to swim|set goals for a new year|deal with difficult customers|choose a laptop|remember names"
).split("|")  # fmt: skip
PEOPLE = (
    "a pirate captain|a medieval knight|a grumpy chef|Sherlock Holmes|a wise old monk|a ship's computer|a news reporter|"
    "a kindergarten teacher|a stand-up comedian|an astronaut on the space station|a Victorian explorer|a travel guide|"
    "a football coach|a museum curator|a strict librarian|a fairy godmother|a marine biologist|a financial adviser|"
    "a career coach|a detective in a noir film|an alien visiting Earth|a weather presenter|a gardener|Leonardo da Vinci|"
    "a robot butler|a history professor|a sommelier|a personal trainer|a tired parent|a wizard|a customer support agent|"
    "a nurse|a philosopher from ancient Greece|a mountain guide|a sailor|a poet|a judge|a software architect"
).split("|")  # fmt: skip
AUDIENCE = (
    "a five-year-old|a high school student|a university student|a complete beginner|an expert in another field|"
    "a group of tourists|an elderly neighbour|a busy manager|someone who hates the subject"
).split("|")  # fmt: skip
_PAIRS = (
    "cats and dogs|tea and coffee|Python and Java|lists and tuples in Python|renting and buying a home|electric and petrol "
    "cars|SQL and NoSQL databases|novels and short stories|city life and country life|cycling and running|trains and planes|"
    "supervised and unsupervised learning|TCP and UDP|bacteria and viruses|mitosis and meiosis|stocks and bonds|weather and "
    "climate|speed and velocity|capitalism and socialism|email and instant messaging|working from home and in an office|"
    "analog and digital watches|butter and margarine|renewable and fossil energy|stacks and queues|comets and asteroids|"
    "paper books and e-books|inductive and deductive reasoning|socialism and communism|heat and temperature"
).split("|")  # fmt: skip
_NAMES = (
    "Amara Bruno Chen Dalia Emeka Farah Goran Hana Ivo Jamila Kofi Lena Marco Nadia Omar Petra Quinn Rosa Samir Tara"
).split()
_TOWNS = "Arden Brookfield Carlow Dunmore Eastvale Fernhill Glenrock Harwick Inverdale Kelso Larch Midwater".split()
_STUFF = (
    "laptop kettle bicycle jacket phone lamp blender tent camera suitcase printer chair".split()
)


def _writing(r: random.Random) -> str:
    theme, good, task, place = (
        r.choice(_THEMES),
        r.choice(_GOODS),
        r.choice(_TASKS),
        r.choice(_PLACES),
    )
    return r.choice((
        f"Write a short story about {theme}.", f"Write a poem about {theme}.", f"Write a haiku about {theme}.",
        f"Write the opening paragraph of a novel about {theme}.", f"Write a limerick about {theme}.",
        f"Write a dialogue between two friends about {theme}.", f"Write a short story about {theme}, set in {place}.",
        f"Write a product description for {good}.", f"Write an advertisement for {good} in under 80 words.",
        f"Write a persuasive e-mail that recommends {good} to a friend.", f"Give me five slogans for {good}.",
        f"Write a polite complaint about {good} that arrived broken.", f"Write a blog post about a weekend in {place}.",
        f"Describe a morning in {place} so that the reader can almost hear and smell it.",
        f"Plan a three-day trip to {place}.", f"Write a travel blog about a visit to {place} with local food and customs.",
        f"Write a blog post with tips on how to {task}.", f"Write an outline for an article on how to {task}.",
        f"Write a formal letter to a landlord in {r.choice(_TOWNS)} about a leaking roof.",
        f"Draft an e-mail to a colleague named {r.choice(_NAMES)} to move the meeting about {r.choice(_TECH)}.",
        f"Write a thank-you note to {r.choice(_NAMES)} for {r.choice(_GOODS)}.",
        f"Write a movie review of a film about {theme}.", f"Write a one-page essay on {r.choice(_SOCIETY)}.",
        f"Summarise the main arguments for and against {r.choice(_SOCIETY)} in a short essay.",
        f"Write an introduction for a talk about {r.choice(_SCIENCE)}.",
        f"Write a song chorus about {theme}.", f"Describe {theme} in three sentences, each with a different mood.",
        f"Write a LinkedIn post about how to {task}.", f"Write a lesson plan that introduces {r.choice(_SCIENCE)}.",
    ))  # fmt: skip


def _explain(r: random.Random) -> str:
    x = r.choice(r.choice((_SCIENCE, _TECH, _SOCIETY)))
    who = r.choice(AUDIENCE)
    return r.choice((
        f"Explain {x} to {who}.", f"What is {x}?", f"Explain {x} in simple terms.", f"Give me an overview of {x}.",
        f"How would you describe {x} to {who}? Use an everyday comparison.", f"Why does {x} matter?",
        f"What are the most important facts about {x}?", f"List five common misconceptions about {x}.",
        f"What are the advantages and disadvantages of {x}?", f"Describe the history of {x}.",
        f"Write a quiz with five questions about {x} and give the answers.", f"Give an example of {x} in daily life.",
        f"What should I read to learn more about {x}?", f"Explain the key ideas behind {x} and how they are used today.",
        f"What questions about {x} are still open?", f"Summarise {x} in three sentences.",
        f"What is the role of {x} in modern life? Give two examples.", f"Define {x} and name its main parts.",
        f"What are the differences between {r.choice(_PAIRS)}?", f"Compare {r.choice(_PAIRS)} in a table.",
        f"Which would you choose: {r.choice(_PAIRS)}? Give reasons.",
        f"How is {x} connected with {r.choice(r.choice((_SCIENCE, _TECH, _SOCIETY)))}?",
    ))  # fmt: skip


def _advice(r: random.Random) -> str:
    task = r.choice(_TASKS)
    return r.choice((
        f"How can I {task}?", f"Give me ten tips to {task}.", f"Make a weekly plan that helps me to {task}.",
        f"What are common mistakes when people try to {task}?", f"I want to {task}, but I have little time. What do you "
        f"suggest?", f"Write a step-by-step guide: how to {task}.", f"What do I need to {task}? Make a checklist.",
        f"My friend {r.choice(_NAMES)} wants to {task}. What advice should I give?", f"Motivate me to {task}.",
        f"Can you recommend three ways to {task} and rank them?", f"Is it worth it to {task}? Why or why not?",
    ))  # fmt: skip


def _roleplay(r: random.Random) -> str:
    who, x = r.choice(PEOPLE), r.choice(r.choice((_SCIENCE, _TECH, _SOCIETY)))
    return r.choice((
        f"Pretend to be {who} and explain {x}.", f"You are {who}. Introduce yourself to a new visitor.",
        f"Act as {who}. I ask you: how can I {r.choice(_TASKS)}?", f"Imagine you are {who}. What did you do yesterday?",
        f"Take the role of {who} and describe {r.choice(_PLACES)}.", f"Answer as {who}: what do you think about {x}?",
        f"You are {who} who is asked about {r.choice(_PAIRS)}. Stay in character.",
        f"Write an interview with {who} about {r.choice(_THEMES)}.", f"Speak like {who} and sell me {r.choice(_GOODS)}.",
    ))  # fmt: skip


def _reasoning(r: random.Random) -> str:
    a, b, c, d = r.sample(_NAMES, 4)
    x, y, z = r.sample(_STUFF, 3)
    k = r.randint(3, 30)
    return r.choice((
        f"{a} is taller than {b}. {c} is shorter than {b}. Who is the tallest? Explain.",
        f"{a}, {b} and {c} each own one thing: a {x}, a {y} or a {z}. {a} does not own the {x}. {b} owns the {y}. Who owns "
        f"what?", f"In a queue, {a} stands before {b}, {c} stands behind {b}, and {d} is last. Give the order.",
        f"If today is day {k} of the month and a Tuesday, which weekday is day {k + r.randint(2, 20)}?",
        f"All {x}s in the room are red. This thing is red. Is it a {x}? Explain your reasoning.",
        f"{a} says that {b} lies. {b} says that {c} tells the truth. {c} says that {a} lies. Who may be honest?",
        f"Continue the sequence: {k}, {k + 3}, {k + 8}, {k + 15}, ... and explain the rule.",
        f"A {x} costs twice as much as a {y}; a {y} costs ${k} less than a {z}. Which of them is the cheapest?",
        f"{a} is the sister of {b}, and {b} is the father of {c}. How is {a} related to {c}?",
        f"Which word does not belong: {x}, {y}, {z}, happiness? Why?",
        f"You see a wet {x} outside, but it has not rained. Give three possible explanations.",
        f"{a} walked {k} metres north, then {k} metres east and {k} metres south. Where is {a} relative to the start?",
        f"How would you find out which of {k} boxes holds the {x} if you may open at most half of them?",
    ))  # fmt: skip


def _extraction(r: random.Random) -> str:
    a, b, c = r.sample(_NAMES, 3)
    t, u = r.sample(_TOWNS, 2)
    x, y = r.sample(_STUFF, 2)
    year, price = r.randint(1950, 2023), r.randint(15, 900)
    text = r.choice((
        f"{a} from {t} bought a {x} for ${price} in {year}. Two weeks later {b} from {u} sold a {y} to {c}.",
        f"The meeting in {t} on {r.randint(1, 28)} March {year} was led by {a}. {b} took notes, {c} arrived late. The {x} "
        f"project got ${price},000, the {y} project was stopped.",
        f"Review by {a}: the {x} works well, but the battery is weak. Review by {b}: I sent the {y} back after a week. "
        f"Review by {c}: great {x}, fair price (${price}).",
        f"Order {r.randint(1000, 9999)}: 2 x {x}, 1 x {y}; ship to {a}, {r.randint(1, 99)} Mill Road, {t}. Invoice to {b} in {u}. "
        f"Total ${price}.",
        f"In {year}, {t} had {r.randint(5, 90)} thousand inhabitants and {u} had {r.randint(5, 90)} thousand. The mayor of "
        f"{t}, {a}, promised a new bridge; {b}, mayor of {u}, disagreed.",
    ))  # fmt: skip
    ask = r.choice((
        "List all names and places in this text as JSON.", "Summarise the following text in one sentence.",
        "Extract all numbers from the text and say what they stand for.", "Turn this text into a table.",
        "Rewrite the text in a friendly tone.", "Write three questions that this text answers.",
        "Which people are mentioned, and what did they do?", "Classify the mood of the text as positive, neutral or "
        "negative and explain.", "Correct the style and make the text shorter.", "Convert the facts to a bullet list.",
    ))  # fmt: skip
    return f"{ask}\n\n{text}" if r.random() < 0.7 else f"{text}\n\n{ask}"


_KINDS: tuple[Callable[[random.Random], str], ...] = (
    _writing, _writing, _writing, _explain, _explain, _explain, _advice, _roleplay, _reasoning, _extraction,
)  # fmt: skip


def chat_prompt(rng: random.Random) -> str:
    """One conversation prompt (single turn)."""
    return rng.choice(_KINDS)(rng)
