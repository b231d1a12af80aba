"""Common pet names, written for this project, for a run of the example without a download."""

from __future__ import annotations

_PACKED = """
abba abbey abbie abby abe abigail ace achilles ada adam addie adele admiral agatha agnes ajax akira alba albert albie
aldo alex alexa alf alfie alfred alice allie alma alvin amber ambrose amelia amigo amos amy anchor andy angel angie
angus anita anna annabelle annie anton apollo apple april aquila archer archie argo argus aria ariel aries arlo arnold
arrow artemis arthur arya ash ashley aslan aspen asta aster astrid astro athena atlas atticus aubrey audrey augie august
aurora autumn ava avalon avery axel aztec babe babs baby bacchus bacon badger bagel bagheera bailey baldwin balto bambi
bamboo bandit banjo banner banshee barkley barley barnaby barney baron bart bartok basil baxter bay baylee beagle bean
beanie bear beau beauty becky bee beetle belinda bella belle ben benji bennett benny benson bentley berkeley bernard
bernie berry bert bertha bess bessie beth betsy betty bianca bigfoot biggie bilbo bill billie billy bindi bing bingo
birch birdie biscuit bishop bismarck blackberry blackie blake blanca blaze blinky bliss blitz blizzard blondie blossom
blue bluebell bo boba bobbie bobby bobo bodie bogart bogey bolt bonnie bono boo boomer boone boots boris bosco boss
boston bounce bowie bowser bozo bradley brady bramble brandi brandy bravo breeze brewster briar bridget brie briggs
brinkley brisket britta brodie bronco bronson brooke brooklyn brownie bruce bruin bruno brutus bryn bubba bubbles buck
buckeye buckley bucky bud buddha buddy buffy bugsy bullet bumble bunny burt burton busby buster butch butter buttercup
butterfly butterscotch button buttons buzz byron cactus cadbury caesar cairo cali calico callie calvin calypso camden
cameo camille camper candy capone cappuccino captain caramel carbon carl carla carlos carly carmel carmen carmine carob
carrie carson carter casey cash cashew casper cassandra cassidy cassie castor cece cecil cedar celeste celia chai chance
chandler chanel chantilly chaos chaplin charcoal charger charles charlie charlotte chase chauncey cheddar cheech cheeky
cheerio chelsea cherry cheshire chess chester chestnut chevy chewie chewy chica chichi chico chili chilly chip chipper
chippy chips chiquita chloe choco chocolate chopin chopper chowder chris chubby chuck chuckles chunk chutney cider
cinder cinderella cindy cinnamon cisco claire clara clarence clark claude clementine cleo cleopatra cliff clifford
clover clyde coal coco cocoa coconut cody cola colby cole colette colin comet comfort conan cookie cooper copper coral
corbin cordelia cori corky cosette cosmo cotton cougar courtney cowboy coyote cracker crackers cricket crimson crispin
crosby crumpet crystal cuddles cupcake cupid curly custard cutie cypress cyrus daffodil dagger dahlia daisy dakota dale
dallas damian dan dana dancer dandelion dandy dante daphne darby darcy daria darius darla dash dasher dave david davy
dawn dawson deacon dean debbie dee delia delilah della delta denali dennis denver derby desmond dew dewey dexter diamond
diana dice dickens diego diesel digby digger dillon dilly dimples dinah dingo dinky dino dixie dizzy doc dodger dolce
dolly dolores domino don donald donna donut doodle dora doris dorothy dory dot dottie dougal douglas dove doyle draco
dragon drake dream drew duchess dude dudley duffy duke dulce duncan dunkin dusty dutch dylan eagle earl earnest ebony
echo ecuador eddie eddy eden edgar edie edison edith edna edward eeyore effie einstein elaine elder eleanor eli elias
ella elle ellie elliot elmer elmo elsa elsie elton elvira elvis elwood ember emerald emerson emily emma emmett emmy enzo
eric erin ernie esme esmeralda esther etta eugene eva evan eve evelyn everest evie ezra fable faith falcon fancy fang
fanny farley fawkes fawn faye feather felicia felicity felix fern ferris fidget fido fifi figaro figgy figment finch
finley finn finnegan fiona firefly fisher fizz flash fleur flicka flint flipper flo flopsy flora florence flounder
flower floyd fluffy flurry flynn fonzie forest forrest foster foxy fraggle fran francesca francis frank frankie franklin
franny freckles fred freddie freddy freedom freya frida friday frisco frisky fritz frodo frosty fudge fuji fuzzy gabby
gabe gabriel gaia galaxy galileo gandalf garbo garfield garnet garth gary gaston gatsby gemini gemma general genevieve
genie george georgia georgie geronimo gertie ghost gia gibson gidget gigi gilbert gilda gilligan gilly ginger ginny gino
giselle gizmo gladys glenn glitter gloria gnocchi goblin goldie goldy goliath gonzo goober goofy goose gordie gordon
grace gracie graham granger granite greta gretchen gretel grey griffin grizzly groucho grover gucci guinness gulliver
gumbo gumdrop gunner gunther gus gwen hadley hagrid hailey hal haley hamilton hamish hamlet hamlin hank hannah hannibal
hans happy hardy harley harmony harold harper harriet harris harrison harry harvey hattie havana hawk hawkeye haywood
hazel heath heather heaven hector heidi helen helga henley henri henrietta henry hera herbie hercules herman hermes
hermione hershey higgins hilda hiro hobbes hobbit hobo hogan holiday holly homer honey honeybun hoover hope horace
horatio hotdog houdini houston howard howie hubert huck huckleberry hudson huey hugh hugo humphrey hunter huxley
hyacinth iago ian icarus iggy igor ike imogen india indie indigo indy inga inky ira irene iris irma isaac isabel
isabella isadora isis isla ivan ivory ivy izzy jack jackie jackson jade jagger jaguar jake jamaica james jamie jane
janet janie jasmine jason jasper java jax jay jazz jazzy jeannie jeeves jelly jellybean jemima jenna jennie jenny jeremy
jersey jesse jessica jessie jet jethro jetta jewel jiggy jill jilly jimbo jimmy jingles jinx joanie jocko joe joey
johnny jolene jolie jolly jonas jordan josephine josh josie journey joy juan jude judy jules julia julian juliet julius
june juneau junebug jungle junior juniper juno jupiter justice justin kahlua kai kali kallie kara karma kasey kate katie
katy kayla keanu keeper keiko kelly kelsey kendall kenny kenya kenzie kerry khan kiara kibble kiki killian kim kimba
kimchi king kingsley kinsey kip kipper kira kirby kismet kit kitkat kitty kiwi klaus knight knox koala kobe koda kodiak
koko kona kong kosmo kramer kringle kurt kyle lacey lady ladybug lana lance lancelot lando lark larry lassie latte laura
laurel lavender layla leah leela lefty legend leia leila lemon lena lenny leo leon leona leonard leopold leroy leslie
lester levi lewis lexi libby liberty licorice lila lilac lilith lilly lily lime lincoln linda linus lionel liza lizzie
lloyd logan lois loki lola lollipop london loretta lotte lottie lotus lou louie louis louisa louise lovey luca lucas
lucia lucille lucky lucy ludwig luigi luke lulu luna lupin lupita luther lydia lynx lyra mabel mable mac macaroni
macduff mace mackenzie macy madden maddie maddox maddy madeline madison madonna mae maggie magic magnolia magnum magnus
mahogany maisie maisy major mali malibu mallory mambo mandy mango manny maple marble marcel marco marcus margaret margo
margot maria mariah marie marigold marilyn mario marius marla marley marlin marlo marlowe mars marshall marshmallow
martha martin marty marvin mary mason matilda matisse mattie maude maui maurice mauve maverick mavis max maxi maxie
maximus maxine maxwell maya mayday mazie meadow meg megan mel melanie melba melody melon melvin memphis mercedes mercury
mercy meredith merlin merlot merry mia micah michelle mickey midas midge midnight midori miko mila mildred miles millie
milly milo milton mimi mimosa mina mindy minerva ming mini minka minnie minty miranda mischief misha mishka missy mister
misty mitch mittens mitzi mocha mochi mojo molly mona monet money mongo monique monkey monroe monster montana monte
montgomery monty moo mookie moon moonbeam moose mopsy morgan morris mortimer morty moses moss mouse mozart muffin muffy
mulan mulberry mulder mulligan munchkin murphy murray mustang myra myrtle mystic mystique nacho nadia nala nana nancy
naomi napoleon nash natalie natasha nebula nectar ned nell nellie nelson nemo neo neptune nero nessie nettie neville
newton nia nibbles nicholas nick nickel nicky nico nicole nikita nikki niko nina ninja nip noah noble nola noodle
noodles nora norbert norma norman nova nugget nutmeg nyla nyx oak oakley oatmeal obie obsidian ocean octavia odessa odie
odin odysseus olaf olga olive oliver olivia ollie omar omega onyx oona opal ophelia opie orange orbit orchid oreo orion
orlando orson orville oscar oslo osprey oswald otis otter otto owen ozark ozzie ozzy pablo pacino paddington paddy paige
paisley paloma pam panama pancake panda pandora pansy panther papaya paprika paris parker parsley patch patches patience
patrick patsy patty paula pauline paws payton peach peaches peachy peanut pearl pebble pebbles pecan peek peggy penelope
penguin penny peony pepe pepper peppermint peppy pepsi percy perdita perry persephone persia pesto pete petey petunia
phantom pharaoh phil philo phineas phoebe phoenix picasso piccolo pickle pickles pierre piglet pikachu pike pilot pinky
pinto piper pippa pippi pippin pippy pirate pistachio pita pixel pixie pluto pocket poe pogo pokey polar polly polo
pomelo poncho pongo popcorn popeye poppet poppy porkchop porsche porter portia posey possum potter precious prescott
presley preston pretzel primrose prince princess priscilla priya puck pudding puff puffin puffy puma pumba pumpernickel
pumpkin punkin puppy purdy puzzle quartz queenie quentin quest quigley quill quincy quinn quinoa quito rabbit rachel
radar raisin ralph rambo ramona randy ranger raphael rascal raspberry raven ravioli ray rebel red reese reggie regina
reilly reina remington remus remy rene reno reuben rex rey rhea rhett rhino rhubarb richie ricky rico rider rigby riley
ringo rio ripley ripple rita river roan rob robbie robert robin rocco rocket rockstar rocky rodeo roger roland rolo
roman romeo romy ronan ronnie roo rooney rory rosa rosalie rosco roscoe rose rosebud rosemary rosie roswell rowan rowdy
roxanne roxie roxy roy royal ruby rudder rudolph rudy rue ruff ruffles rufus rugby rumble rumi rupert russell rusty ruth
ryder rye sabine sable sabrina sadie saffron sage sahara sailor salem sally salsa salt salty sam samantha sambuca sammie
sammy samson samuel sandy santana santiago sapphire sarah sarge sasha sashimi saskia sassafras sassy satchel saturn
savanna savannah sawyer scamp scarlet scarlett schatzi schroeder scooby scooter scotch scottie scout scrappy scruffy
seamus sebastian selena selma senna serena seuss seymour shadow shaggy shamrock shana shane shasta sheba shelby sheldon
shelly sherlock sherman sherry shiloh shiner shiver shorty sidney sienna sierra sigmund silas silver silvia simba simon
simone sinatra sinclair siren sirius skipper skippy skittles sky skye skyler slate sleepy slick slinky smiley smokey
smores smudge snapper snickers snoopy snowball snowbell snowflake snowy socks sofia sol solo sonny sonya sooty sophia
sophie sorbet sox spanky sparkle sparkles sparky sparrow spartacus spectre spencer spice spider spike spirit spock
spooky spot spring sprinkles sprite sprout spud spunky squash squeaky squid squirt stanley star starbuck stardust
starlight starsky stella stephanie sterling steve stevie stewart stitch stormy strawberry stripe stuart sugar sultan
summer summit sunbeam sundance sunday sunflower sunny sunshine surf sushi susie sutton suzie sweetie sweetpea swiffer
sybil sydney sylvester sylvia tabby tabitha taco taffy tag tahoe talia tallie tallulah tango tanner tansy tara tarzan
tasha tate tater tatiana tawny taylor taz teacup teddy tegan templeton tequila terra tess tessa tessie texas thea thelma
theo theodore thistle thomas thor thorn thumper thunder thyme tia tibby tiberius tickles tiffany tigger tigress tilda
tilly tim timber timmy timothy tina tink tinker tinkerbell tinsel tiny tipper tippy tipsy titan titus tobias toby todd
toffee tofu tom tomato tommy tonka tonto tony toots tootsie topaz topper tori toto toulouse tracker travis treasure
trevor trigger trinity tripp tripper trixie trooper trouble trout trudy truffle truman trumpet tucker tucson tuffy
tugboat tulip tumbles tundra turbo turner turtle tux tuxedo twiggy twilight twinkle twix tyler tyson ulysses uma umber
unity ursa ursula vader val valentina valentine valentino valkyrie valley vanessa vanilla vega velma velvet venus vera
verdi vernon vesper vesta vicky victor victoria vienna vince vincent vinnie vino viola violet viper virgil virginia vito
vivian vixen volt waddles waffle waffles wags waldo walker wallace wally walnut walter wanda warren watson wednesday
wendy wesley whisker whiskers whiskey whisper whitney wicket widget wiggles wilbur wilder willa willie willis willow
willy wilma wilson winchester winger wink winkie winnie winslow winston winter wishbone wizard wolf wolfgang wolfie
wonton woodrow woodstock woody woofer wrangler wren wrigley wyatt wynn xander xavier xena yahtzee yaki yankee yara yoda
yogi yoko yoshi yuki yukon yumi yuri yvette zack zane zara zazu zeb zebra zeke zelda zen zena zeppelin zero zeus zia
ziggy zinnia zipper zippy ziva zoe zoey zola zorro zuko zulu zuri zuzu
"""

EMBEDDED_NAMES: tuple[str, ...] = tuple(_PACKED.split())
"""Tuple of 1,981 different names, in lower case and alphabetical order."""
