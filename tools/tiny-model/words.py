"""The vocabulary of the generated world: plain lists, no logic.

Common words and names become single tokens, because the tokenizer is trained on text made of them.
"""

NAMES = """
Ada Alma Anton Aria Basil Bella Bruno Carla Cora Cyril Dana Daria Edgar Elias Ella Emil Enzo Erik Esther
Felix Fiona Flora Freya Gavin Greta Gus Hana Hector Helga Hugo Ida Ines Iris Ivan Jasper Jonas Juno Karin
Kira Klaus Lara Leon Lena Lina Luca Luna Mara Marco Mila Milo Mona Nadia Nora Nils Olga Omar Oscar Otto
Paula Perla Petra Pia Quinn Ralf Rosa Ruben Rufus Sana Selma Silas Simon Sofia Sven Tara Tessa Theo Tilda
Tobin Ugo Ulla Uma Vera Victor Viola Wanda Willa Xenia Yara Yuri Zara Zelda Zoe Alice Bob Clara David Emma
Frank Grace Henry Jack Kate Liam Mary Noah Peter Rita Sam Tom Ben Max Lucy Paul Anna
""".split()

SYLLABLES = """
ba be bo da de do fa fi ga go ha he jo ka ki ko la le li lo ma me mi mo na ne no pa pe ra re ri ro sa se si
so ta te ti to va ve vi wa wi ya zo zu bran dor fen gar hal jin kel lun mir nor pol quor rin sol tam vex wyn
""".split()

COLOURS = "red blue green yellow black white brown grey pink purple orange golden silver".split()

ADJECTIVES = COLOURS + """
small big old new round square heavy light broken shiny wooden glass paper iron soft tiny dusty strange
""".split()

THINGS = """
key lamp cup book box ring coin map rope bell drum hat coat shoe glove stone shell feather mirror candle clock
knife spoon plate bowl basket bottle brush comb pen letter ball kite doll flute needle button ribbon scarf
ladder hammer bucket pillow blanket chair table crown sword shield lantern compass whistle jar
""".split()

ANIMALS = """
cat dog fox owl bear wolf hare mouse goat horse sheep duck goose frog crow deer mole snail turtle rabbit parrot
pony hen bee fish otter lion tiger
""".split()

FOODS = """
bread cheese soup honey apples pears plums grapes nuts rice beans cake pie jam milk tea coffee butter carrots
onions olives lemons peaches pancakes noodles salad eggs berries chocolate biscuits
""".split()

TOWNS = """
Paris London Rome Oslo Madrid Berlin Vienna Prague Lisbon Dublin Athens Cairo Delhi Tokyo Lima Quito Boston
Denver Geneva Milan Turin Porto Bergen Malmo Ghent Lyon Nice Bonn Kiev Riga Seoul Osaka Havana Dakar Tunis
""".split()

JOBS = """
baker farmer doctor teacher painter sailor miner tailor singer dancer writer pilot cook nurse judge barber
carpenter fisher gardener hunter potter weaver guard driver builder clerk
""".split()

INSTRUMENTS = "piano violin guitar harp trumpet cello banjo organ flute drum horn fiddle".split()

ROOMS = """
kitchen attic cellar garden garage library bedroom hall barn tower stable office shed bathroom chapel workshop
""".split()

CONTAINERS = "chest drawer cupboard sack bag trunk crate barrel case suitcase tin pot".split()

KIN = "teacher friend sister brother neighbour doctor boss cousin uncle aunt coach partner".split()

TIMES = "morning evening night day afternoon spring summer autumn winter".split()

WEATHER = "cold warm quiet loud strong gentle wet dry bright dark".split()

PLURALS = "birds leaves clouds stars waves children trees flowers boats horses windows houses hills roads".split()

PLACES = "river forest market bridge mill harbour field road lake hill village square school church".split()
